"""Linear attention, and its causal sums in chunks.

Causal sums are products inside a chunk, plus the state ``s = Σ φ(k) vᵀ``, ``z = Σ φ(k)`` of the
chunks before it. As in algorithm 1 of arXiv 2006.16236, the backward pass of long sequences
computes the states again, span after span.

Tokens are [B, h, T, ·] and in chunks [B, h, n, c, ·], states of chunks [B, h, n, d, ·].
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear_terms import FeatureMap, LinearState, Maps, features, resolve
from ..online_softmax import composed_gradients, mean, needs_torch
from ..tracing import no_autocast, transformed

# O(T·d·CHUNK) operations in chunks, T·d·m / CHUNK elements of states.
CHUNK = 32
# Up to this many rows of all heads the terms are stored for the backward pass, which saves a third
# of the time; of more rows it computes them again in spans of SPAN_ROWS.
STORED_ROWS, SPAN_ROWS = 2**16, 2**11


class FeatureMaps(NamedTuple):
    query_map: FeatureMap
    key_map: FeatureMap
    eps: float

    def query(self, x: Tensor) -> Tensor:
        """Return φ(q), divided by its largest feature unless eps > 0."""
        mapped = features(self.query_map, x)
        if self.eps:
            return mapped
        largest = mapped.detach().amax(-1, keepdim=True)
        return mapped / largest.masked_fill(largest == 0, 1)

    def key(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        """Return φ(k), 0 where key_mask, which lacks the last dimension, hides it."""
        mapped = features(self.key_map, x)
        return mapped if key_mask is None else mapped * key_mask.unsqueeze(-1)

    def apply(
        self, tokens: Iterable[Tensor], key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = tokens
        return self.query(query), self.key(key, key_mask), value


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: Maps,
    causal: bool,
    key_mask: Tensor | None,
    eps: float,
) -> Tensor:
    """Compute :func:`aft_mm.ops.linear_attention` in O(T·d·(m + CHUNK))."""
    maps = FeatureMaps(*resolve(feature_map), eps)
    if key_mask is not None:
        hidden = ~key_mask[..., None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    dtype = torch.promote_types(value.dtype, torch.float32)
    tokens = [x.transpose(1, 2) for x in (query, key, value)]
    mask = None if key_mask is None else key_mask.unsqueeze(1)
    if causal:
        mixed = _causal_mean(tokens, mask, maps, dtype)
    else:
        mapped = maps.apply((x.to(dtype) for x in tokens), mask)
        mixed = _quotient(mapped[0] @ (mapped[1].mT @ _with_one(mapped[2])), eps)
    return mixed.transpose(1, 2).to(value.dtype)


def linear_attention_step(
    state: LinearState, query: Tensor, key: Tensor, value: Tensor, *, feature_map: Maps, eps: float
) -> tuple[Tensor, LinearState]:
    """Compute one step in O(d·m) per head, in place."""
    maps, sums = FeatureMaps(*resolve(feature_map), eps), state.sums
    # One token, [B, h, 1, ·].
    dtype, tokens = value.dtype, (x.to(sums.dtype).unsqueeze(2) for x in (query, key, value))
    query, key, value = maps.apply(tokens, None)
    # A copy where the strides of a state of the caller prevent a view.
    flat = sums.flatten(0, 1)
    flat.baddbmm_(key.mT.flatten(0, 1), _with_one(value).flatten(0, 1))
    sums = flat.view_as(sums)
    mixed = _quotient(query @ sums, eps).squeeze(2)
    return mixed.to(dtype), LinearState(sums, state.position + 1)


def linear_attention_sums(
    key: Tensor, value: Tensor, key_mask: Tensor, dtype: torch.dtype, *, feature_map: Maps
) -> Tensor:
    """Return ``Σ φ(k) [v, 1]ᵀ`` of the visible tokens, [B, h, d, m + 1]."""
    hidden = ~key_mask[..., None, None]
    key, value = (x.to(dtype).masked_fill(hidden, 0) for x in (key, value))
    mapped = FeatureMaps(*resolve(feature_map), 0.0).key(key, key_mask.unsqueeze(-1))
    return mapped.permute(0, 2, 3, 1) @ _with_one(value).transpose(1, 2)


def _with_one(value: Tensor) -> Tensor:
    return F.pad(value, (0, 1), value=1.0)


def _quotient(sums: Tensor, eps: float) -> Tensor:
    return mean(sums[..., :-1], sums[..., -1:] + eps)


def _causal_mean(
    tokens: Sequence[Tensor], mask: Tensor | None, maps: FeatureMaps, dtype: torch.dtype
) -> Tensor:
    """Return the causal mean [B, h, T, m] of query, key and value [B, h, T, ·]."""
    batch, heads, length, _ = tokens[0].shape
    chunk = min(CHUNK, length)
    # A graph would repeat its nodes for every span.
    whole = torch.compiler.is_compiling() or batch * heads * length <= STORED_ROWS
    span = length if whole else chunk * max(1, SPAN_ROWS // (batch * heads * chunk))
    run = partial(_span_mean, maps, chunk, dtype)
    if whole or transformed() or not torch.is_grad_enabled():
        return _mean_of_spans(run, span, mask, *tokens)[0]
    return _RecomputedMean.apply(run, span, mask, *tokens)


def _mean_of_spans(
    run: Callable[..., Any], span: int, mask: Tensor | None, *tokens: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor] | None]]:
    parts: list[Tensor] = []
    states: list[tuple[Tensor, Tensor] | None] = [None]
    for rows in _spans(span, tokens[0]):
        mixed, state = run(*_cut(rows, *tokens, mask), states[-1])
        parts.append(mixed)
        states.append(state)
    return torch.cat(parts, 2) if len(parts) > 1 else parts[0], states[:-1]


def _spans(span: int, x: Tensor) -> list[slice]:
    return [slice(start, start + span) for start in range(0, x.shape[2], span)]


def _cut(rows: slice, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x[:, :, rows] for x in tensors]


class _RecomputedMean(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], span: int, mask: Tensor | None, *tokens: Tensor
    ) -> Tensor:
        mixed, ctx.states = _mean_of_spans(run, span, mask, *tokens)
        ctx.call = run, span
        ctx.save_for_backward(mask, *tokens)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, *tokens = ctx.saved_tensors
        run, span = ctx.call
        if needs_torch(grad):

            def call(*tokens: Tensor) -> Tensor:
                return _mean_of_spans(run, span, mask, *tokens)[0]

            grads = composed_gradients(ctx.needs_input_grad[3:], call, tokens, grad)
            return None, None, None, *grads
        whole = [torch.empty_like(x) for x in tokens]
        grad_state: Sequence[Tensor] = ()
        for rows, state in reversed([*zip(_spans(span, grad), ctx.states, strict=True)]):
            *leaves, visible, cotangent = _cut(rows, *tokens, mask, grad)
            with torch.enable_grad(), no_autocast(grad):
                leaves = [x.detach().requires_grad_() for x in leaves]
                state = state and tuple(x.detach().requires_grad_() for x in state)
                mixed, following = run(*leaves, visible, state)
                outputs = (mixed, *following) if grad_state else (mixed,)
                pairs = zip(outputs, (cotangent, *grad_state), strict=True)
                # Feature maps may have no gradient.
                kept, cotangents = zip(
                    *(pair for pair in pairs if pair[0].requires_grad), strict=True
                )
                inputs = *leaves, *(state or ())
                parts = torch.autograd.grad(kept, inputs, cotangents, materialize_grads=True)
            for x, part in zip(whole, parts[:3], strict=True):
                x[:, :, rows] = part
            grad_state = parts[3:]
        return None, None, None, *whole


def _span_mean(
    maps: FeatureMaps,
    chunk: int,
    dtype: torch.dtype,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    state: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the causal mean of a span and the state ``s`` [B, h, d, m], ``z`` [B, h, d, 1] after
    it.
    """
    length = query.shape[2]
    mapped = maps.apply((x.to(dtype) for x in (query, key, value)), mask)
    padding = 0, 0, 0, -length % chunk
    query, key, value = (F.pad(x, padding).contiguous().unflatten(2, (-1, chunk)) for x in mapped)
    weights = (query @ key.mT).tril()
    sums = key.mT @ value, key.sum(3).unsqueeze(-1)
    s, z = (_states_before(x, first) for x, first in zip(sums, state or (None, None), strict=True))
    numerator = weights @ value + query @ s
    denominator = weights.sum(-1, True) + query @ z
    mixed = mean(numerator, denominator + maps.eps).flatten(2, 3)[:, :, :length]
    return mixed, (s[:, :, -1] + sums[0][:, :, -1], z[:, :, -1] + sums[1][:, :, -1])


def _states_before(states: Tensor, first: Tensor | None) -> Tensor:
    """Return the state before each chunk [B, h, n, ·], from the sums of chunks."""
    first = torch.zeros_like(states[:, :, 0]) if first is None else first
    return torch.cat((first.unsqueeze(2), states[:, :, :-1]), 2).cumsum(2)
