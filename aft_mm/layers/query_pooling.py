import torch
from torch import Tensor, nn

from aft_mm import ops
from aft_mm.checks import check_int
from aft_mm.ops.checks import check_num_heads
from aft_mm.registry import MODELS

from .mixers.base import check_tokens, hide_tokens
from .resetting import Resettable


@MODELS.register_module()
class QueryPooling(Resettable):
    """AFT-simple with one learned query q, ``[B, T, D] -> [B, D]``, for sets and for images.

    ``y = proj(σ(q) ⊙ Σ_t softmax(k)[t] v_t)`` with ``k = key(x)`` and ``v = value(x)``.
    ``softmax(k)`` [T] of each head is the map of what is pooled.

    Args:
        num_heads: Channels h of the keys, a divisor of D. Head i weights the channels i·D/h …
            (i+1)·D/h − 1 of v.
    """

    def __init__(self, embed_dims: int, num_heads: int = 1) -> None:
        check_int('embed_dims', embed_dims, 1)
        check_num_heads(num_heads, embed_dims)
        super().__init__()
        self.query = nn.Parameter(torch.zeros(embed_dims))
        self.key = nn.Linear(embed_dims, num_heads)
        self.value = nn.Linear(embed_dims, embed_dims)
        self.proj = nn.Linear(embed_dims, embed_dims)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Return the pooled tokens [B, D] of x [B, T, D].

        Args:
            key_mask: bool [B, T], True = keep. Hidden tokens may hold NaN and get a gradient of 0;
                without a visible token the result is that of v = 0.
        """
        check_tokens('x', x, 'B', 'T', len(self.query))
        if key_mask is not None:
            x = hide_tokens(x, key_mask)
        key, value = self.key(x), self.value(x)
        query = self.query.to(value.dtype).expand(len(x), 1, -1)
        key = key.repeat_interleave(value.shape[-1] // key.shape[-1], -1)
        pooled: Tensor = self.proj(ops.aft_simple(query, key, value, key_mask=key_mask).squeeze(1))
        return pooled
