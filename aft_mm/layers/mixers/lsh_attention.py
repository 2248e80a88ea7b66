from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.checks import check_int
from aft_mm.ops.checks import check_num_heads
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import TokenMixer
from .softmax_attention import split_heads
from .token_table import TokenTable

# A token with itself: counts only if it sees no other.
SELF_LOGIT = -1e5


class LSHState(NamedTuple):
    """Keys and values of all tokens; the last ones of each bucket [B, h, rounds, n, c + 1]."""

    table: TokenTable
    recent: Tensor

    @property
    def position(self) -> Tensor:
        return self.table.position


class _Order(NamedTuple):
    """Bucket of each token, the tokens sorted by it, and their places, [B, h, rounds, T] each."""

    bucket: Tensor
    token: Tensor
    position: Tensor


@MODELS.register_module()
class LSHAttention(TokenMixer):
    """Softmax attention among tokens of the same hash bucket (Reformer, arXiv 2001.04451, §2).

    Query and key share one projection, and keys have length 1. Each round hashes tokens into
    buckets, ``argmax([xR, −xR])``, and sorts them by bucket. A token sees those of its bucket in
    its chunk and the chunk before; if causal, the last chunk_size earlier tokens of its bucket. One
    softmax covers the union of the rounds. A token sees itself only if it sees no other.

    Args:
        num_heads: h, a divisor of D.
        num_rounds: Hashes per token.
        num_buckets: An even number, or 1 for no hashing.
        chunk_size: Tokens of a chunk.
        **kwargs: See :class:`TokenMixer`; grid is required for steps.
    """

    rotations: Tensor
    state_type = LSHState
    example = dict(num_heads=3, num_rounds=2, num_buckets=2, chunk_size=4)

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        num_rounds: int = 4,
        num_buckets: int = 64,
        chunk_size: int = 32,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, **kwargs)
        check_num_heads(num_heads, embed_dims)
        for name, number in (('num_rounds', num_rounds), ('chunk_size', chunk_size)):
            check_int(name, number, 1)
        check_int('num_buckets', num_buckets, 1)
        if num_buckets > 1 and num_buckets % 2:
            raise ValueError(f'num_buckets must be 1 or even and positive, got {num_buckets}')
        self.num_heads, self.num_rounds = num_heads, num_rounds
        self.num_buckets, self.chunk_size = num_buckets, chunk_size
        self.query = None
        dims = embed_dims // num_heads
        self.register_buffer(
            'rotations', torch.randn(num_heads, num_rounds, dims, num_buckets // 2)
        )

    def buckets(self, key: Tensor) -> Tensor:
        """Return the bucket of each key [B, h, T, D/h] in each round, [B, h, rounds, T]."""
        if self.num_buckets == 1:
            shape = (*key.shape[:2], self.num_rounds, key.shape[2])
            return torch.zeros(shape, dtype=torch.long, device=key.device)
        rotated = key.detach().unsqueeze(2) @ self.rotations.to(key.dtype)
        return torch.cat((rotated, -rotated), -1).argmax(-1)

    def _order(self, key: Tensor, key_mask: Tensor | None) -> _Order:
        bucket = self.buckets(key)
        if key_mask is not None:  # sort hidden tokens last
            bucket = bucket.masked_fill(~key_mask[:, None, None], self.num_buckets)
        tokens = torch.arange(key.shape[2], device=key.device)
        token = (bucket * len(tokens) + tokens).argsort(-1)
        position = torch.empty_like(token).scatter_(-1, token, tokens.expand_as(token))
        return _Order(bucket, token, position)

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        key, value = split_heads(key, self.num_heads), split_heads(value, self.num_heads)
        order, size = self._order(key, key_mask), min(self.chunk_size, key.shape[2])
        # The padding of the last chunk holds token −1.
        token = F.pad(order.token, (0, -key.shape[2] % size), value=-1).unflatten(-1, (-1, size))
        source = _with_chunk_before(token)
        rounds = [self._count(order, r, token, source, key_mask) for r in range(self.num_rounds)]
        count = torch.stack(rounds).sum(0)
        visible = torch.stack([mask[:, :, r] for r, mask in enumerate(rounds)], 2)
        logits = _take(key, token) @ _with_chunk_before(_take(_unit(key), token)).mT
        logits = logits.to(_wide(logits)) * key.shape[-1] ** -0.5
        logits = logits.masked_fill(token.unsqueeze(-1) == source.unsqueeze(-2), SELF_LOGIT)
        # A token seen in several rounds counts once.
        logits = (logits - count.clamp_min(1).to(logits).log()).masked_fill(~visible, -torch.inf)
        lowest = torch.finfo(logits.dtype).min
        total = logits.logsumexp(-1, keepdim=True).clamp_min(lowest)
        weights = (logits - total).exp().to(value.dtype)
        mixed = (weights @ _with_chunk_before(_take(value, token))).flatten(3, 4)
        position = order.position.unsqueeze(-1)
        mixed = mixed.gather(3, position.expand(*position.shape[:-1], mixed.shape[-1]))
        share = total.flatten(3, 4).gather(3, position).softmax(2)
        result: Tensor = (mixed * share.to(mixed.dtype)).sum(2)
        return result.transpose(1, 2).flatten(2)

    def _count(
        self, order: _Order, r: int, target: Tensor, source: Tensor, key_mask: Tensor | None
    ) -> Tensor:
        """Return whether round r shows source to target, bool [B, h, rounds, chunks, c, 2c]."""

        def at(x: Tensor, token: Tensor) -> Tensor:
            flat = token.clamp_min(0).flatten(2)
            return x[:, :, r].gather(2, flat).view(token.shape)

        exists = source >= 0
        if key_mask is not None:
            mask = key_mask[:, None].expand(-1, source.shape[1], -1)
            exists &= mask.gather(2, source.clamp_min(0).flatten(2)).view(source.shape)
        same = at(order.bucket, target).unsqueeze(-1) == at(order.bucket, source).unsqueeze(-2)
        positions = (
            at(order.position, target).unsqueeze(-1),
            at(order.position, source).unsqueeze(-2),
        )
        if self.causal:
            distance = positions[0] - positions[1]
            near = (distance >= 0) & (distance <= self.chunk_size)
        else:
            chunks = [position // self.chunk_size for position in positions]
            near = (chunks[0] == chunks[1]) | (chunks[0] == chunks[1] + 1)
        return same & near & exists.unsqueeze(-2)

    def _init_state(self, batch_size: int) -> LSHState:
        tokens = prod(self._required_grid(' to take steps'))
        shape = (batch_size, self.num_heads, self.num_rounds, self.num_buckets, self.chunk_size + 1)
        recent = torch.full(shape, -1, dtype=torch.long, device=self._device)
        channels = (self.embed_dims, self.embed_dims)
        return LSHState(TokenTable.empty(batch_size, tokens, channels, self._reference()), recent)

    def _prefill(self, state: LSHState, key: Tensor, value: Tensor, lengths: Tensor) -> LSHState:
        table = state.table.fill((key, value), lengths)
        tokens = torch.arange(key.shape[1], device=key.device)
        order = self._order(split_heads(key, self.num_heads), tokens < lengths[:, None])
        bucket = order.bucket.gather(-1, order.token)
        sizes = bucket.new_zeros(*bucket.shape[:-1], self.num_buckets + 1)
        ends = sizes.scatter_add_(-1, bucket, torch.ones_like(bucket)).cumsum(-1)
        # Later tokens in the bucket.
        after = ends.gather(-1, bucket) - 1 - tokens
        slots = self.chunk_size + 1
        slot = bucket * slots + (slots - 1 - after)
        slot = slot.masked_fill((after >= slots) | (bucket == self.num_buckets), -1) + 1
        recent = F.pad(state.recent.flatten(3), (1, 0), value=-1).scatter(-1, slot, order.token)
        return LSHState(table, recent[..., 1:].view(state.recent.shape))

    def _mix_step(
        self, query: Tensor, key: Tensor, value: Tensor, state: LSHState
    ) -> tuple[Tensor, LSHState]:
        query_heads = split_heads(key.unsqueeze(1), self.num_heads)
        bucket = self.buckets(query_heads).unsqueeze(-1)
        bucket = bucket.expand(*bucket.shape[:-1], state.recent.shape[-1])
        table, recent = state.table.store(key, value), state.recent
        target = table.position[:, None, None, None] - 1
        last = recent.gather(3, bucket).squeeze(3)
        last = torch.cat((last[..., 1:], target.expand(*last.shape[:-1], 1)), -1)
        recent.scatter_(3, bucket, last.unsqueeze(3))
        source = last.flatten(2).sort(-1).values  # [B, h, rounds · (c + 1)]
        again = F.pad(source[..., 1:] == source[..., :-1], (1, 0))
        keys, values = (_take(split_heads(x, self.num_heads), source) for x in table.rows)
        logits = (query_heads @ _unit(keys.to(query_heads.dtype)).mT).squeeze(2)
        logits = logits.to(_wide(logits)) * query_heads.shape[-1] ** -0.5
        logits = logits.masked_fill(source == target.squeeze(-1), SELF_LOGIT)
        weights = logits.masked_fill(again | (source < 0), -torch.inf).softmax(-1)
        mixed = weights.to(value.dtype).unsqueeze(2) @ values.to(value.dtype)
        return mixed.flatten(1), LSHState(table, recent)


def _with_chunk_before(x: Tensor) -> Tensor:
    """Join chunks [B, h, rounds, n, c, ...] with their predecessors, [..., n, 2c, ...]."""
    empty = torch.full_like(x[:, :, :, :1], 0 if x.is_floating_point() else -1)
    return torch.cat((torch.cat((empty, x[:, :, :, :-1]), 3), x), 4)


def _take(x: Tensor, token: Tensor) -> Tensor:
    """Return rows of x [B, h, T, d] for tokens [B, h, ...], [B, h, ..., d]; any row for −1."""
    index = token.clamp_min(0).flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
    rows: Tensor = x.gather(2, index).unflatten(2, token.shape[2:])
    return rows


def _unit(key: Tensor) -> Tensor:
    return F.normalize(key, dim=-1)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
