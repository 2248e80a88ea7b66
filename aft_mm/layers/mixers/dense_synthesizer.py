from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from aft_mm.ops.checks import check_num_heads
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import TokenMixer
from .softmax_attention import masked_softmax, split_heads
from .token_table import TokenTable


@MODELS.register_module()
class DenseSynthesizer(TokenMixer):
    """Attention weights predicted by each token alone, without keys (arXiv 2005.00743, §3.1).

    ``softmax(W₂ relu(W₁ x)) v`` per head, with W₁ [D, D], W₂ [T, D/h] and the largest length T.

    Args:
        num_heads: h, a divisor of D.
        **kwargs: See :class:`TokenMixer`; grid is required.
    """

    example = dict(num_heads=3)

    state_type = TokenTable

    def __init__(self, embed_dims: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(embed_dims, **kwargs)
        check_num_heads(num_heads, embed_dims)
        self.num_heads = num_heads
        self.key = nn.Identity()  # no keys; the query is W₁ x
        tokens = prod(self._required_grid())
        self.weight = nn.Parameter(torch.empty(num_heads, embed_dims // num_heads, tokens))
        self.bias = nn.Parameter(torch.zeros(num_heads * tokens))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def _logits(self, query: Tensor, sources: int) -> Tensor:
        """Return logits [B, h, T, S] for the query W₁ x, [B, T, D]."""
        hidden = split_heads(query.relu(), self.num_heads)
        bias = self.bias.view(self.num_heads, 1, -1)[..., :sources]
        return hidden @ self.weight[..., :sources].to(hidden) + bias.to(hidden)

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        learned = self._required_grid()
        shorter = len(grid) == len(learned) == 1 and grid < learned
        if grid != learned and not shorter:
            raise ValueError(
                f'grid must be that of the learned weights, {learned}, or shorter in 1-d, '
                f'got {tuple(grid)}'
            )
        visible = torch.ones_like(key[:, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        visible = visible[:, None, None].expand(-1, 1, visible.shape[1], -1)
        visible = visible.tril() if self.causal else visible
        weights = masked_softmax(self._logits(query, key.shape[1]), visible)
        mixed = weights.to(value.dtype) @ split_heads(value, self.num_heads)
        return mixed.transpose(1, 2).flatten(2)

    def _init_state(self, batch_size: int) -> TokenTable:
        tokens = self.weight.shape[2]
        return TokenTable.empty(batch_size, tokens, (self.embed_dims,), self._reference())

    def _prefill(
        self, state: TokenTable, key: Tensor, value: Tensor, lengths: Tensor
    ) -> TokenTable:
        return state.fill((value,), lengths)

    def _mix_step(
        self, query: Tensor, key: Tensor, value: Tensor, state: TokenTable
    ) -> tuple[Tensor, TokenTable]:
        state = state.store(value)
        places = torch.arange(state.size, device=value.device)
        visible = (places < state.position[:, None])[:, None, None]
        weights = masked_softmax(self._logits(query.unsqueeze(1), state.size), visible)
        values = split_heads(state.rows[0].to(value.dtype), self.num_heads)
        return (weights.to(value.dtype) @ values).transpose(1, 2).flatten(1), state
