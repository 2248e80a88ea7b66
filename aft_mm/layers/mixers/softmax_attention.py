"""Softmax attention, the baseline."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.registry import MODELS

from ..grid import Grid
from .base import TokenMixer


class KeyValueCache(NamedTuple):
    """The keys and values so far, each [B, h, t, D/h]."""

    key: Tensor
    value: Tensor

    @property
    def position(self) -> int:
        """Index of the next token."""
        return self.key.shape[2]


@MODELS.register_module()
class SoftmaxAttention(TokenMixer):
    """Multi-head attention, ``softmax(q kᵀ / √(D/h)) v`` per head, on scaled_dot_product_attention.

    A query that sees no key gets 0. The state of a step grows with the tokens, O(t·D), and so does
    the cost of a step.

    Args:
        embed_dims: channels D.
        num_heads: h, a divisor of D.
        others: see :class:`TokenMixer`.
    """

    takes_memory = True
    takes_prefix_tokens = True

    def __init__(self, embed_dims: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(embed_dims, **kwargs)
        if num_heads < 1 or embed_dims % num_heads:
            raise ValueError(f'num_heads must divide embed_dims={embed_dims}, got {num_heads}')
        self.num_heads = num_heads

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)

    def _mix(self, query, key, value, grid: Grid, key_mask: Tensor | None) -> Tensor:
        query, key, value = self._heads(query), self._heads(key), self._heads(value)
        if key_mask is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        else:
            visible = key_mask[:, None, None, :].expand(-1, 1, query.shape[2], -1)
            if self.causal:
                visible = visible.tril()
            # A row of −inf would be NaN in some kernels, so it sees everything and is set to 0.
            some = visible.any(-1, keepdim=True)
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible | ~some)
            mixed = mixed * some
        return mixed.transpose(1, 2).flatten(2)

    def _init_state(self, batch_size: int) -> KeyValueCache:
        shape = (batch_size, self.num_heads, 0, self.embed_dims // self.num_heads)
        empty = torch.empty(shape, device=self._device, dtype=self.proj.weight.dtype)
        return KeyValueCache(empty, empty)

    def _mix_step(self, query, key, value, state: KeyValueCache) -> tuple[Tensor, KeyValueCache]:
        query, key, value = (self._heads(x.unsqueeze(1)) for x in (query, key, value))
        # Under autocast keys have another type than the weights, and than the empty cache.
        key = torch.cat([state.key.to(key.dtype), key], dim=2)
        value = torch.cat([state.value.to(value.dtype), value], dim=2)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(1, 2).flatten(1), KeyValueCache(key, value)
