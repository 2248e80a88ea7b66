"""Causal linear attention with fla-core's kernel for the numerator."""

from fla.ops.linear_attn import chunk_linear_attn
from torch import Tensor

from ..eager.linear import FeatureMaps
from ..eager.online_softmax import mean
from ..linear_terms import resolve


def linear_attention(query, key, value, *, feature_map, causal, key_mask, eps) -> Tensor:
    """The denominator is summed here: the kernel's own adds a constant to it."""
    maps = FeatureMaps(*resolve(feature_map), eps)
    if key_mask is not None:
        hidden = ~key_mask[..., None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    query, key = maps.query(query.float()), maps.key(key.float(), key_mask)
    terms = (x.to(value.dtype) for x in (query, key, value))
    numerator, _ = chunk_linear_attn(*terms, scale=1.0, normalize=False)
    denominator = (query * key.cumsum(1)).sum(-1, keepdim=True)
    return mean(numerator.float(), denominator + eps).to(value.dtype)
