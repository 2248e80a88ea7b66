"""Linear attention, and its causal gradient in constant memory.

Causal sums run in chunks: products inside a chunk, and the state ``[s, z] = Σ φ(k) [v, 1]ᵀ`` of the
chunks before it. The backward pass is algorithm 1 of arXiv 2006.16236 in chunks: states forwards
again for the queries, then ``Σ φ(q) ∂ᵀ`` backwards for keys and values.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..linear_terms import FeatureMap, LinearState, features, resolve
from .online_softmax import mean, no_autocast

# O(T·d·CHUNK) operations in chunks, T·d·m / CHUNK elements of states.
CHUNK = 32
# Rows of a span, which bounds temporaries.
SPAN_ROWS = 2048


class _Terms(NamedTuple):
    """φ(q), φ(k) and [v, 1] of some chunks, [B, h, n, C, ·]."""

    query: Tensor
    key: Tensor
    value: Tensor

    def states(self) -> Tensor:
        """Return ``Σ φ(k) [v, 1]ᵀ`` of each chunk, [B, h, n, d, m + 1]."""
        return self.key.mT @ self.value

    def weights(self) -> Tensor:
        """Return the causal weights inside each chunk, [B, h, n, C, C]."""
        return (self.query @ self.key.mT).tril()


class FeatureMaps(NamedTuple):
    """Feature maps of queries and keys, and the constant added to the denominator."""

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
        """Return φ(k) [B, S, h, d], 0 where key_mask [B, S] hides it."""
        mapped = features(self.key_map, x)
        return mapped if key_mask is None else mapped * key_mask[..., None, None]

    def apply(
        self, tokens: Iterable[Tensor], key_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return φ(q), φ(k) and [v, 1]."""
        query, key, value = tokens
        return self.query(query), self.key(key, key_mask), _with_one(value)


def linear_attention(query, key, value, *, feature_map, causal, key_mask, eps) -> Tensor:
    """Compute :func:`aft_mm.ops.linear_attention` in O(T·d·(m + CHUNK))."""
    maps = FeatureMaps(*resolve(feature_map), eps)
    if key_mask is not None:
        hidden = ~key_mask[..., None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    if causal:
        return _CausalMean.apply(query, key, value, key_mask, maps)
    tokens = (x.to(torch.promote_types(value.dtype, torch.float32)) for x in (query, key, value))
    terms = _terms(*maps.apply(tokens, key_mask), None)
    mixed = _quotient(terms.query @ terms.states(), eps)
    return _unchunk(mixed, query.shape[1]).to(value.dtype)


def linear_attention_step(state, query, key, value, *, feature_map, eps):
    """Compute one step in O(d·m) per head, in place."""
    maps, sums = FeatureMaps(*resolve(feature_map), eps), state.sums
    # Chunks of one token, [B, h, 1, ·].
    tokens = (x.to(sums.dtype).unsqueeze(2) for x in (query, key, value))
    query_features, key_features, value_and_one = maps.apply(tokens, None)
    # A copy where the strides of a state of the caller prevent a view.
    flat = sums.flatten(0, 1)
    flat.baddbmm_(key_features.mT.flatten(0, 1), value_and_one.flatten(0, 1))
    sums = flat.view_as(sums)
    mixed = _quotient(query_features @ sums, eps).squeeze(2)
    return mixed.to(value.dtype), LinearState(sums, state.position + 1)


def linear_attention_sums(key, value, key_mask, dtype, *, feature_map) -> Tensor:
    """Return ``Σ φ(k) [v, 1]ᵀ`` of the visible tokens, [B, h, d, m + 1]."""
    hidden = ~key_mask[..., None, None]
    key, value = (x.to(dtype).masked_fill(hidden, 0) for x in (key, value))
    mapped = FeatureMaps(*resolve(feature_map), 0.0).key(key, key_mask)
    return mapped.permute(0, 2, 3, 1) @ _with_one(value).transpose(1, 2)


def _with_one(value: Tensor) -> Tensor:
    return F.pad(value, (0, 1), value=1.0)


def _chunks(x: Tensor, chunk: int | None) -> Tensor:
    """Return [B, T, h, c] as [B, h, n, C, c], padded with 0; None for one chunk."""
    x = x.transpose(1, 2)
    if chunk is None:
        return x.unsqueeze(2)
    return F.pad(x, (0, 0, 0, -x.shape[2] % chunk)).unflatten(2, (-1, chunk))


def _unchunk(x: Tensor, tokens: int) -> Tensor:
    return x.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


def _terms(query: Tensor, key: Tensor, value: Tensor, chunk: int | None) -> _Terms:
    return _Terms(*(_chunks(x, chunk) for x in (query, key, value)))


def _quotient(sums: Tensor, eps: float) -> Tensor:
    return mean(sums[..., :-1], sums[..., -1:] + eps)


def _grad_quotient(sums: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the divisor of the numerator's gradient, and the gradient of the denominator."""
    denominator = sums[..., -1:] + eps
    is_empty = denominator < torch.finfo(denominator.dtype).tiny
    denominator = denominator.masked_fill(is_empty, torch.inf)
    mixed = sums[..., :-1] / denominator
    return denominator, -(grad / denominator * mixed).sum(-1, True)


def _states_before(states: Tensor, first: Tensor) -> Tensor:
    """Return the state before each chunk."""
    return torch.cat((first.unsqueeze(2), states[:, :, :-1]), 2).cumsum(2)


class _CausalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, key_mask, maps):
        ctx.maps = maps
        ctx.save_for_backward(query, key, value, key_mask)
        state, mixed = _empty_state(key, value, maps), torch.empty_like(value)
        chunk, spans = _spans(query)
        for span in spans:
            tokens = (x[:, span].to(state.dtype) for x in (query, key, value))
            mask = None if key_mask is None else key_mask[:, span]
            terms = _terms(*maps.apply(tokens, mask), chunk)
            states = terms.states()
            sums = terms.weights() @ terms.value + terms.query @ _states_before(states, state)
            mixed[:, span] = _unchunk(_quotient(sums, maps.eps), mixed[:, span].shape[1])
            state = state + states.sum(2)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        with no_autocast(grad):
            return _CausalMean._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx, grad):
        query, key, value, key_mask = ctx.saved_tensors
        maps, tensors = ctx.maps, (query, key, value, grad)
        grad_query, grad_key, grad_value = map(torch.empty_like, (query, key, value))
        chunk, spans = _spans(query)
        state, rows = _empty_state(key, value, maps), []
        dtype = state.dtype

        def cut(span: slice) -> tuple[Tensor, ...]:
            mask = None if key_mask is None else key_mask[:, span]
            return *(x[:, span].to(dtype) for x in tensors), mask

        for span in spans:
            q, k, v, g, mask = cut(span)
            mapped, pull_back = torch.func.vjp(maps.query, q)
            terms = _terms(mapped, maps.key(k, mask), _with_one(v), chunk)
            grad_mapped, state, row = _grad_queries(terms, state, _chunks(g, chunk), maps.eps)
            grad_query[:, span] = pull_back(_unchunk(grad_mapped, q.shape[1]))[0]
            rows.append(row)
        later = torch.zeros_like(state)
        for span, row in zip(reversed(spans), reversed(rows), strict=True):
            q, k, v, g, mask = cut(span)
            mapped, pull_back = torch.func.vjp(lambda x, mask=mask: maps.key(x, mask), k)
            terms = _terms(maps.query(q), mapped, _with_one(v), chunk)
            *grads, later = _grad_sources(terms, later, _chunks(g, chunk), *row)
            grad_mapped, grad_values = (_unchunk(x, q.shape[1]) for x in grads)
            grad_key[:, span] = pull_back(grad_mapped)[0]
            grad_value[:, span] = grad_values[..., :-1]
        return grad_query, grad_key, grad_value, None, None


def _grad_queries(
    terms: _Terms, first: Tensor, grad: Tensor, eps: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return the gradient of φ(q) of a span, the state after it, and :func:`_grad_quotient`.

    first: the state before the span; grad: the gradient of its output, in chunks.
    """
    own = terms.states()
    states = _states_before(own, first)
    sums = terms.weights() @ terms.value + terms.query @ states
    row = _grad_quotient(sums, eps, grad)
    grad_sums = torch.cat((grad / row[0], row[1]), -1)
    grad_weights = (grad_sums @ terms.value.mT).tril()
    return grad_weights @ terms.key + grad_sums @ states.mT, first + own.sum(2), row


def _grad_sources(
    terms: _Terms, later: Tensor, grad: Tensor, denominator: Tensor, grad_denominator: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of φ(k) and [v, 1] of a span, and ``Σ φ(q) ∂ᵀ`` from the span on.

    later: that sum after the span; the denominators are those of :func:`_grad_quotient`.
    """
    grad_sums = torch.cat((grad / denominator, grad_denominator), -1)
    grad_weights = (grad_sums @ terms.value.mT).tril()
    own = terms.query.mT @ grad_sums
    after = _states_before(own.flip(2), later).flip(2)
    grad_key = grad_weights.mT @ terms.query + terms.value @ after.mT
    grad_value = terms.weights().mT @ grad_sums + terms.key @ after
    return grad_key, grad_value, later + own.sum(2)


def _empty_state(key: Tensor, value: Tensor, maps: FeatureMaps) -> Tensor:
    dtype = torch.promote_types(value.dtype, torch.float32)
    dims = maps.key_map(key[:1, :1].to(dtype)).shape[-1]
    return value.new_zeros(len(value), value.shape[2], dims, value.shape[3] + 1, dtype=dtype)


def _spans(query: Tensor) -> tuple[int, list[slice]]:
    """Return the tokens of a chunk, and the spans that cover all tokens."""
    batch, tokens, heads = query.shape[:3]
    chunk = min(CHUNK, tokens)
    size = chunk * max(1, SPAN_ROWS // (batch * heads * chunk))
    return chunk, [slice(start, start + size) for start in range(0, tokens, size)]
