"""The dense Synthesizer."""

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
    """Weights that each token predicts by itself, without keys (arXiv 2005.00743, section 3.1).

    ``softmax(W₂ relu(W₁ x)) v`` per head, W₁ D × D, W₂ T × D/h for each head. A token predicts one
    weight for each place of the table, so a sequence may be shorter than `grid`, not longer.
    O(T²·D) time, O(T² h + T·D) memory; the state of a step is O(T·D), the values of all tokens, and
    its cost O(T·D).

    Args:
        embed_dims: channels D.
        num_heads: h, a divisor of D.
        others: see :class:`TokenMixer`; grid is required.
    """

    state_type = TokenTable

    def __init__(self, embed_dims: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(embed_dims, **kwargs)
        check_num_heads(num_heads, embed_dims)
        if self.grid is None:
            raise ValueError('grid must be given for DenseSynthesizer, got None')
        self.num_heads = num_heads
        # Nothing is compared; the query is W₁ x.
        self.key = nn.Identity()
        tokens = torch.Size(self.grid).numel()
        self.weight = nn.Parameter(torch.empty(num_heads, embed_dims // num_heads, tokens))
        self.bias = nn.Parameter(torch.zeros(num_heads * tokens))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def _logits(self, query: Tensor, sources: int) -> Tensor:
        """[B, h, T, S] of the query [B, T, D]."""
        hidden = split_heads(query.relu(), self.num_heads)
        bias = self.bias.view(self.num_heads, 1, -1)[..., :sources]
        return hidden @ self.weight[..., :sources].to(hidden) + bias.to(hidden)

    def _mix(self, query, key, value, grid: Grid, key_mask: Tensor | None) -> Tensor:
        shorter = len(grid) == len(self.grid) == 1 and grid < self.grid
        if grid != self.grid and not shorter:
            raise ValueError(
                f'grid must be {self.grid}, or shorter in 1-d, as DenseSynthesizer has learned on '
                f'it, got {tuple(grid)}'
            )
        visible = torch.ones_like(key[:, :, 0], dtype=torch.bool) if key_mask is None else key_mask
        visible = visible[:, None, None].expand(-1, 1, visible.shape[1], -1)
        visible = visible.tril() if self.causal else visible
        weights = masked_softmax(self._logits(query, key.shape[1]), visible)
        mixed = weights.to(value.dtype) @ split_heads(value, self.num_heads)
        return mixed.transpose(1, 2).flatten(2)

    def _init_state(self, batch_size: int) -> TokenTable:
        tokens = self.weight.shape[2]
        return TokenTable.empty(batch_size, tokens, (self.embed_dims,), self.proj.weight)

    def _prefill(self, state: TokenTable, key, value, lengths: Tensor) -> TokenTable:
        return state.fill((value,), lengths)

    def _mix_step(self, query, key, value, state: TokenTable) -> tuple[Tensor, TokenTable]:
        state = state.store(value)
        places = torch.arange(state.size, device=value.device)
        visible = (places < state.position[:, None])[:, None, None]
        weights = masked_softmax(self._logits(query.unsqueeze(1), state.size), visible)
        values = split_heads(state.rows[0].to(value.dtype), self.num_heads)
        return (weights.to(value.dtype) @ values).transpose(1, 2).flatten(1), state
