"""Linear attention of the default backend, and its gradient in constant memory.

Causal sums run in chunks: products inside a chunk, and the state ``[s, z] = Σ φ(k) [v, 1]ᵀ`` of the
chunks before it. A span of chunks is worked on at a time. Saved for the gradient are the inputs and
the state before each span; features, weights and states inside of it are made anew, as algorithm 1
of arXiv 2006.16236 does token by token: states run forwards for the gradient of the queries,
backwards for those of keys and values.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..linear_terms import FeatureMap, LinearState, features, resolve
from .sums import mean

# T·d·CHUNK for the products inside the chunks against T·d·m / CHUNK numbers of states.
CHUNK = 32
# Rows of a span in all sequences and heads together: what it works on stays small beside a long
# sequence, and beside a large batch.
SPAN_ROWS = 4096


class _Terms(NamedTuple):
    """φ(q), φ(k) and [v, 1] of some chunks in the type of sums, [B, h, n, C, ·]."""

    query: Tensor
    key: Tensor
    value: Tensor

    def states(self) -> Tensor:
        """``Σ φ(k) [v, 1]ᵀ`` of each chunk, [B, h, n, d, m + 1]."""
        return self.key.mT @ self.value


def linear_attention(query, key, value, *, feature_map, causal, key_mask, eps) -> Tensor:
    """O(T·d·(m + CHUNK)); not causal, two products, φ(q) (φ(k)ᵀ v)."""
    maps = Maps(*resolve(feature_map), eps)
    if key_mask is not None:
        hidden = ~key_mask[..., None, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    if causal:
        return _CausalMean.apply(query, key, value, key_mask, maps)
    parts = (x.to(_accumulation_type(value)) for x in (query, key, value))
    terms = _terms(*maps.apply(*parts, key_mask), None)
    mixed = _quotient(terms.query @ terms.states(), eps)
    return _tokens(mixed, query.shape[1]).to(value.dtype)


def linear_attention_step(state, query, key, value, *, feature_map, eps):
    """O(d·m) per head: the token joins the sums, in place."""
    maps, sums = Maps(*resolve(feature_map), eps), state.sums
    # As chunks of one token, [B, h, 1, ·].
    parts = maps.apply(*(x.to(sums.dtype).unsqueeze(2) for x in (query, key, value)), None)
    sums += parts[1].mT @ parts[2]
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

    def apply(self, query, key, value, keep) -> tuple[Tensor, Tensor, Tensor]:
        """φ(q), φ(k) and [v, 1]."""
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


def _quotient_gradient(sums: Tensor, eps: float, gradient: Tensor) -> Tensor:
    """The gradient towards numerator and denominator, [..., m + 1]."""
    denominator = sums[..., -1:] + eps
    nothing = denominator < torch.finfo(denominator.dtype).tiny
    scaled = gradient / denominator.masked_fill(nothing, torch.inf)
    mixed = sums[..., :-1] / denominator.masked_fill(nothing, torch.inf)
    return torch.cat((scaled, -(scaled * mixed).sum(-1, True)), -1)


def _before(states: Tensor, first: Tensor) -> Tensor:
    """The state before each chunk, of the states of the chunks and that before the first."""
    return torch.cat((first.unsqueeze(2), states[:, :, :-1]), 2).cumsum(2)


def _causal_sums(terms: _Terms, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numerator and denominator, the weights inside the chunks, and the states before them."""
    states = _before(terms.states(), first)
    weights = (terms.query @ terms.key.mT).tril()
    return weights @ terms.value + terms.query @ states, weights, states


class _CausalMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, keep, maps):
        (batch, _, heads, channels), dtype = value.shape, _accumulation_type(value)
        # A feature map may make more or fewer than d of d channels.
        dims = maps.of_key(key[:1, :1].to(dtype)).shape[-1]
        state = value.new_zeros(batch, heads, dims, channels + 1, dtype=dtype)
        mixed, before = torch.empty_like(value), []
        chunk, spans = _spans(query)
        for span in spans:
            parts = (x[:, span].to(dtype) for x in (query, key, value))
            terms = _terms(*maps.apply(*parts, None if keep is None else keep[:, span]), chunk)
            before.append(state)
            sums = _causal_sums(terms, state)[0]
            mixed[:, span] = _tokens(_quotient(sums, maps.eps), mixed[:, span].shape[1])
            state = state + terms.states().sum(2)
        ctx.maps = maps
        ctx.save_for_backward(query, key, value, keep, *before)
        return mixed

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, keep, *before = ctx.saved_tensors
        maps, dtype = ctx.maps, before[0].dtype
        gradients = tuple(map(torch.empty_like, (query, key, value)))
        later = torch.zeros_like(before[0])
        chunk, spans = _spans(query)
        for span, first in zip(reversed(spans), reversed(before), strict=True):
            parts = [x[:, span].to(dtype) for x in (query, key, value)]
            kept = None if keep is None else keep[:, span]
            mapped, pull_back = torch.func.vjp(lambda *x, kept=kept: maps.apply(*x, kept), *parts)
            terms = _terms(*mapped, chunk)
            towards, later = _span_gradient(
                terms, first, later, _chunks(gradient[:, span].to(dtype), chunk), maps.eps
            )
            tokens = parts[0].shape[1]
            pulled = pull_back(tuple(_tokens(x, tokens) for x in towards))
            for whole, part in zip(gradients, pulled, strict=True):
                whole[:, span] = part
        return *gradients, None, None


def _span_gradient(
    terms: _Terms, first: Tensor, later: Tensor, gradient: Tensor, eps: float
) -> tuple[_Terms, Tensor]:
    """The gradient towards the terms of a span, and the sum ``Σ φ(q) ∂ᵀ`` from it on.

    `first` is the state before the span, `later` that sum over the tokens after it.
    """
    sums, weights, states = _causal_sums(terms, first)
    towards = _quotient_gradient(sums, eps, gradient)
    of_weights = (towards @ terms.value.mT).tril()
    own = terms.query.mT @ towards
    after = _before(own.flip(2), later).flip(2)
    return _Terms(
        of_weights @ terms.key + towards @ states.mT,
        of_weights.mT @ terms.query + terms.value @ after.mT,
        weights.mT @ towards + terms.key @ after,
    ), later + own.sum(2)


def _spans(query: Tensor) -> tuple[int, list[slice]]:
    """Tokens of a chunk, and the spans of chunks that the tokens are cut into."""
    batch, tokens, heads = query.shape[:3]
    chunk = min(CHUNK, tokens)
    size = chunk * max(1, SPAN_ROWS // (batch * heads * chunk))
    return chunk, [slice(start, start + size) for start in range(0, tokens, size)]
