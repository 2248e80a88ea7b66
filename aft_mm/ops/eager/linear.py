"""Linear attention of the default backend, and its gradient in constant memory.

Causal sums run in chunks: products inside a chunk, and the state ``[s, z] = Σ φ(k) [v, 1]ᵀ`` of the
chunks before it. A span of chunks is worked on at a time. Only the inputs are saved for the
gradient, which is algorithm 1 of arXiv 2006.16236 in chunks: states run forwards again for the
gradient of the queries, then ``Σ φ(q) ∂ᵀ`` runs backwards for those of keys and values. Between the
two passes two numbers per row are kept, the denominator and its gradient.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..linear_terms import FeatureMap, LinearState, features, resolve
from .sums import mean

# T·d·CHUNK for the products inside the chunks against T·d·m / CHUNK numbers of states.
CHUNK = 32
# Rows of a span in all sequences and heads together: what it works on stays small beside a long
# sequence, and beside a large batch.
SPAN_ROWS = 2048


class _Terms(NamedTuple):
    """φ(q), φ(k) and [v, 1] of some chunks in the type of sums, [B, h, n, C, ·]."""

    query: Tensor
    key: Tensor
    value: Tensor

    def states(self) -> Tensor:
        """``Σ φ(k) [v, 1]ᵀ`` of each chunk, [B, h, n, d, m + 1]."""
        return self.key.mT @ self.value

    def weights(self) -> Tensor:
        """The causal weights inside each chunk, [B, h, n, C, C]."""
        return (self.query @ self.key.mT).tril()


def linear_attention(query, key, value, *, feature_map, causal, key_mask, eps) -> Tensor:
    """O(T·d·(m + CHUNK)); not causal, two products, φ(q) (φ(k)ᵀ v)."""
    maps = Maps(*resolve(feature_map), eps)
    if key_mask is not None:
        hidden = ~key_mask[..., None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    if causal:
        return _CausalMean.apply(query, key, value, key_mask, maps)
    parts = (x.to(_accumulation_type(value)) for x in (query, key, value))
    terms = _terms(*maps.apply(parts, key_mask), None)
    mixed = _quotient(terms.query @ terms.states(), eps)
    return _tokens(mixed, query.shape[1]).to(value.dtype)


def linear_attention_step(state, query, key, value, *, feature_map, eps):
    """O(d·m) per head: the token joins the sums, in place."""
    maps, sums = Maps(*resolve(feature_map), eps), state.sums
    # As chunks of one token, [B, h, 1, ·].
    parts = maps.apply((x.to(sums.dtype).unsqueeze(2) for x in (query, key, value)), None)
    # One pass: as a product and a sum the state would be read and written twice.
    sums.flatten(0, 1).baddbmm_(parts[1].mT.flatten(0, 1), parts[2].flatten(0, 1))
    mixed = _quotient(parts[0] @ sums, eps).squeeze(2)
    return mixed.to(value.dtype), LinearState(sums, state.position + 1)


def linear_attention_sums(key, value, key_mask, dtype, *, feature_map) -> Tensor:
    """``Σ φ(k) [v, 1]ᵀ`` of the kept tokens, [B, h, d, m + 1]."""
    hidden = ~key_mask[..., None, None]
    key, value = (x.to(dtype).masked_fill(hidden, 0) for x in (key, value))
    mapped = Maps(*resolve(feature_map), 0.0).key(key, key_mask)
    return mapped.permute(0, 2, 3, 1) @ _with_one(value).transpose(1, 2)


def _accumulation_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _with_one(value: Tensor) -> Tensor:
    return F.pad(value, (0, 1), value=1.0)


class Maps(NamedTuple):
    """The feature maps of queries and keys, and what is added to the denominator."""

    of_query: FeatureMap
    of_key: FeatureMap
    eps: float

    def query(self, x: Tensor) -> Tensor:
        """φ(q), over its largest unless eps tells sizes apart: else products underflow."""
        mapped = features(self.of_query, x)
        if self.eps:
            return mapped
        largest = mapped.detach().amax(-1, keepdim=True)
        return mapped / largest.masked_fill(largest == 0, 1)

    def key(self, x: Tensor, keep: Tensor | None) -> Tensor:
        """φ(k) [B, S, h, d], 0 where keep [B, S] hides it."""
        mapped = features(self.of_key, x)
        return mapped if keep is None else mapped * keep[..., None, None]

    def apply(self, parts: Iterable[Tensor], keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """φ(q), φ(k) and [v, 1] of (q, k, v)."""
        query, key, value = parts
        return self.query(query), self.key(key, keep), _with_one(value)


def _chunks(x: Tensor, chunk: int | None) -> Tensor:
    """[B, T, h, c] as [B, h, n, C, c], filled up with 0; None for one chunk of all tokens."""
    x = x.transpose(1, 2)
    if chunk is None:
        return x.unsqueeze(2)
    return F.pad(x, (0, 0, 0, -x.shape[2] % chunk)).unflatten(2, (-1, chunk))


def _tokens(x: Tensor, tokens: int) -> Tensor:
    """[B, h, n, C, c] as [B, T, h, c]."""
    return x.flatten(2, 3)[:, :, :tokens].transpose(1, 2)


def _terms(query: Tensor, key: Tensor, value: Tensor, chunk: int | None) -> _Terms:
    return _Terms(*(_chunks(x, chunk) for x in (query, key, value)))


def _quotient(sums: Tensor, eps: float) -> Tensor:
    return mean(sums[..., :-1], sums[..., -1:] + eps)


def _quotient_gradient(sums: Tensor, eps: float, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """What the numerator's gradient is divided by, and the gradient of the denominator."""
    denominator = sums[..., -1:] + eps
    nothing = denominator < torch.finfo(denominator.dtype).tiny
    denominator = denominator.masked_fill(nothing, torch.inf)
    mixed = sums[..., :-1] / denominator
    return denominator, -(gradient / denominator * mixed).sum(-1, True)


def _before(states: Tensor, first: Tensor) -> Tensor:
    """The state before each chunk, of the states of the chunks and that before the first."""
    return torch.cat((first.unsqueeze(2), states[:, :, :-1]), 2).cumsum(2)


class _CausalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, keep, maps):
        ctx.maps = maps
        ctx.save_for_backward(query, key, value, keep)
        state, mixed = _no_state(key, value, maps), torch.empty_like(value)
        chunk, spans = _spans(query)
        for span in spans:
            parts = (x[:, span].to(state.dtype) for x in (query, key, value))
            terms = _terms(*maps.apply(parts, None if keep is None else keep[:, span]), chunk)
            states = terms.states()
            sums = terms.weights() @ terms.value + terms.query @ _before(states, state)
            mixed[:, span] = _tokens(_quotient(sums, maps.eps), mixed[:, span].shape[1])
            state = state + states.sum(2)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        query, key, value, keep = ctx.saved_tensors
        maps, parts = ctx.maps, (query, key, value, gradient)
        gradients = tuple(map(torch.empty_like, (query, key, value)))
        chunk, spans = _spans(query)
        state, rows = _no_state(key, value, maps), []
        dtype = state.dtype

        def cut(span: slice) -> tuple[Tensor, ...]:
            kept = None if keep is None else keep[:, span]
            return *(x[:, span].to(dtype) for x in parts), kept

        for span in spans:
            q, k, v, g, kept = cut(span)
            mapped, pull_back = torch.func.vjp(maps.query, q)
            terms = _terms(mapped, maps.key(k, kept), _with_one(v), chunk)
            towards, state, row = _query_gradient(terms, state, _chunks(g, chunk), maps.eps)
            gradients[0][:, span] = pull_back(_tokens(towards, q.shape[1]))[0]
            rows.append(row)
        later = torch.zeros_like(state)
        for span, row in zip(reversed(spans), reversed(rows), strict=True):
            q, k, v, g, kept = cut(span)
            mapped, pull_back = torch.func.vjp(lambda x, kept=kept: maps.key(x, kept), k)
            terms = _terms(maps.query(q), mapped, _with_one(v), chunk)
            *towards, later = _source_gradient(terms, later, _chunks(g, chunk), *row)
            of_key, of_value = (_tokens(x, q.shape[1]) for x in towards)
            gradients[1][:, span] = pull_back(of_key)[0]
            gradients[2][:, span] = of_value[..., :-1]
        return *gradients, None, None


def _query_gradient(
    terms: _Terms, first: Tensor, gradient: Tensor, eps: float
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The gradient towards φ(q) of a span, of the state before it; the state after it; two numbers
    per row, see :func:`_quotient_gradient`.
    """
    own = terms.states()
    states = _before(own, first)
    sums = terms.weights() @ terms.value + terms.query @ states
    row = _quotient_gradient(sums, eps, gradient)
    towards = torch.cat((gradient / row[0], row[1]), -1)
    of_weights = (towards @ terms.value.mT).tril()
    return of_weights @ terms.key + towards @ states.mT, first + own.sum(2), row


def _source_gradient(
    terms: _Terms, later: Tensor, gradient: Tensor, denominator: Tensor, of_denominator: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients towards φ(k) and [v, 1] of a span, of ``Σ φ(q) ∂ᵀ`` over the tokens after it;
    and that sum with those of the span.
    """
    towards = torch.cat((gradient / denominator, of_denominator), -1)
    of_weights = (towards @ terms.value.mT).tril()
    own = terms.query.mT @ towards
    after = _before(own.flip(2), later).flip(2)
    of_key = of_weights.mT @ terms.query + terms.value @ after.mT
    of_value = terms.weights().mT @ towards + terms.key @ after
    return of_key, of_value, later + own.sum(2)


def _no_state(key: Tensor, value: Tensor, maps: Maps) -> Tensor:
    """The state before the first token."""
    dtype = _accumulation_type(value)
    # A feature map may make more or fewer than d of d channels.
    dims = maps.of_key(key[:1, :1].to(dtype)).shape[-1]
    return value.new_zeros(len(value), value.shape[2], dims, value.shape[3] + 1, dtype=dtype)


def _spans(query: Tensor) -> tuple[int, list[slice]]:
    """Tokens of a chunk, and the spans of chunks that the tokens are cut into."""
    batch, tokens, heads = query.shape[:3]
    chunk = min(CHUNK, tokens)
    size = chunk * max(1, SPAN_ROWS // (batch * heads * chunk))
    return chunk, [slice(start, start + size) for start in range(0, tokens, size)]
