from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.checks import check_flag
from aft_mm.ops.checks import check_num_heads
from aft_mm.ops.export_paths import export_stage
from aft_mm.ops.state import check_position, use_up
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import TokenMixer
from .token_table import TokenTable


class KeyValueCache(NamedTuple):
    """Buffers for N keys and values, [B, h, N, D/h], of which the first `used` are filled.

    visible: bool [B, N], False at the padding of prompts, or None without padding.
    """

    key: Tensor
    value: Tensor
    visible: Tensor | None
    used: int
    position: Tensor

    def append(self, key: Tensor, value: Tensor) -> 'KeyValueCache':
        """Return the cache with one more token [B, h, 1, D/h], in place if there is room."""
        cache = self if self.used < self.key.shape[2] else self._grown(key.dtype)
        cache.key[:, :, self.used : self.used + 1] = key
        cache.value[:, :, self.used : self.used + 1] = value
        return cache._replace(used=self.used + 1, position=self.position + 1)

    def _grown(self, dtype: torch.dtype) -> 'KeyValueCache':
        # Doubling keeps copies O(1) per token.
        room = max(64, self.used)
        key, value = (F.pad(x.to(dtype), (0, 0, 0, room)) for x in (self.key, self.value))
        visible = None if self.visible is None else F.pad(self.visible, (0, room), value=True)
        return self._replace(key=key, value=value, visible=visible)


def masked_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Return scaled_dot_product_attention over visible keys, 0 without any."""
    if not query.numel():  # torch's attention ends the process for no heads and a mask
        return query
    # Some kernels give NaN for a fully masked row.
    some = visible.any(-1, keepdim=True)
    return some * F.scaled_dot_product_attention(query, key, value, attn_mask=visible | ~some)


def masked_softmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Return the softmax over visible entries of the last axis, in float32 or wider; 0 if none."""
    some = visible.any(-1, keepdim=True)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return logits.masked_fill(~(visible | ~some), -torch.inf).softmax(-1) * some


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """Return [..., T, D] as [..., h, T, D/h]."""
    heads: Tensor = x.unflatten(-1, (num_heads, -1))
    return heads.transpose(-3, -2)


class TokenHistory(NamedTuple):
    """Inputs of all tokens, the first `used` rows filled, for attention without a cache."""

    table: TokenTable
    used: int

    @property
    def position(self) -> Tensor:
        return self.table.position


@MODELS.register_module()
class SoftmaxAttention(TokenMixer):
    """Multi-head attention, ``softmax(q kᵀ / √(D/h)) v`` per head.

    A query that sees no key gets 0.

    Args:
        num_heads: h, a divisor of D.
        stateful: False recomputes all tokens in each step, as the papers measure; steps then need a
            grid.
    """

    example = dict(num_heads=3)

    takes_memory = True
    takes_prefix_tokens = True
    state_type = (KeyValueCache, TokenHistory)

    def __init__(
        self, embed_dims: int, num_heads: int, stateful: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(embed_dims, **kwargs)
        check_num_heads(num_heads, embed_dims)
        self.num_heads = num_heads
        check_flag('stateful', stateful)
        self.stateful = stateful

    def _heads(self, x: Tensor) -> Tensor:
        return split_heads(x, self.num_heads)

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        query, key, value = self._heads(query), self._heads(key), self._heads(value)
        if key_mask is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            visible = key_mask[:, None, None, :].expand(-1, 1, query.shape[2], -1)
            if self.causal:
                visible = visible.tril()
            mixed = masked_attention(query, key, value, visible)
        return mixed.transpose(1, 2).flatten(2)

    @torch.no_grad()
    def prefill(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, KeyValueCache | TokenHistory]:
        y, state = super().prefill(x, lengths)
        if isinstance(state, TokenHistory):
            given = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
            x = x.masked_fill(~given.unsqueeze(-1), 0)
            state = TokenHistory(state.table.fill((x,), lengths), x.shape[1])
        return y, state

    @torch.no_grad()
    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        if not isinstance(state, TokenHistory):
            return super().step(x_t, state)
        self._check_step(x_t, state)
        state = TokenHistory(state.table.store(x_t), state.used + 1)
        x = state.table.rows[0][:, : state.used].to(x_t.dtype)
        query: Any = None if self.query is None else self.query(x)
        mixed = self._mix(query, self.key(x), self.value(x), x.shape[1:2], None)
        last = (state.position - 1).view(-1, 1, 1).expand(-1, 1, self.embed_dims)
        return self.proj_drop(self.proj(mixed.gather(1, last).squeeze(1))), state

    def _init_state(self, batch_size: int) -> KeyValueCache | TokenHistory:
        if not self.stateful:
            grid = self._required_grid(' to take steps with stateful=False')
            tokens = self.num_prefix_tokens + prod(grid)
            options = (self.embed_dims,), self._reference()
            return TokenHistory(TokenTable.empty(batch_size, tokens, *options), 0)
        shape = (batch_size, self.num_heads, 0, self.embed_dims // self.num_heads)
        empty = torch.empty(shape, device=self._device, dtype=self._reference().dtype)
        position = torch.zeros(batch_size, dtype=torch.long, device=self._device)
        return KeyValueCache(empty, empty, None, 0, position)

    def _prefill(
        self, state: KeyValueCache | TokenHistory, key: Tensor, value: Tensor, lengths: Tensor
    ) -> KeyValueCache | TokenHistory:
        if isinstance(state, TokenHistory):
            return state
        tokens = key.shape[1]
        visible = torch.arange(tokens, device=key.device) < lengths[:, None]
        # Prompts of an exported graph have no padding.
        padded = not export_stage() and not bool(visible.all())
        return KeyValueCache(
            self._heads(key),
            self._heads(value),
            visible if padded else None,
            tokens,
            lengths.to(state.position, copy=True),
        )

    def _mix_step(
        self, query: Tensor, key: Tensor, value: Tensor, state: KeyValueCache
    ) -> tuple[Tensor, KeyValueCache]:
        check_position(state.position)
        query, key, value = (self._heads(x.unsqueeze(1)) for x in (query, key, value))
        used, state = state, state.append(key, value)
        use_up(used.position)
        visible = None if state.visible is None else state.visible[:, None, None, : state.used]
        key, value = (x[:, :, : state.used].to(query.dtype) for x in (state.key, state.value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return mixed.transpose(1, 2).flatten(1), state
