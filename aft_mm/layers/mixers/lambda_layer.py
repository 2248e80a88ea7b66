from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from aft_mm.checks import check_int
from aft_mm.ops.checks import check_num_heads
from aft_mm.ops.geometry import kernel_index
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import TokenMixer


@MODELS.register_module()
class LambdaLayer(TokenMixer):
    """Lambda layer with full context (LambdaNetworks, arXiv 2102.08602).

    ``y_t = λ_tᵀ q_t`` with ``λ_t = Σ_t' (softmax(k)[t'] + e[t' − t]) v_t'ᵀ``, shared by all h
    heads. The softmax is over tokens; e is learned per offset. Batch norm of queries and keys makes
    it non-causal.

    Args:
        num_heads: h, a divisor of D.
        key_dims: ``|k|``.
        **kwargs: See :class:`TokenMixer`; grid is required.
    """

    can_be_causal = False
    normalized = False
    example = dict(num_heads=3, key_dims=5)

    def __init__(
        self, embed_dims: int, num_heads: int = 4, key_dims: int = 16, **kwargs: Any
    ) -> None:
        super().__init__(embed_dims, **kwargs)
        check_num_heads(num_heads, embed_dims)
        check_int('key_dims', key_dims, 1)
        learned = self._required_grid()
        self.num_heads, self.key_dims = num_heads, key_dims
        # BatchNorm would subtract a bias.
        self.query = nn.Linear(embed_dims, num_heads * key_dims, bias=False)
        self.key = nn.Linear(embed_dims, key_dims, bias=False)
        self.value = nn.Linear(
            embed_dims, embed_dims // num_heads, bias=self.value.bias is not None
        )
        self.query_norm = nn.BatchNorm1d(num_heads * key_dims)
        self.key_norm = nn.BatchNorm1d(key_dims)
        self.pos_embed = nn.Parameter(torch.empty(*(2 * n - 1 for n in learned), key_dims))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        query = _normalize(self.query_norm, query, key_mask)
        key = _normalize(self.key_norm, key, key_mask)
        if key_mask is not None:
            hidden = ~key_mask.unsqueeze(-1)
            key, value = key.masked_fill(hidden, -torch.inf), value.masked_fill(hidden, 0)
        content = _softmax_over_tokens(key).to(value.dtype)
        query = query.to(value.dtype).unflatten(2, (self.num_heads, -1))
        offsets = self._offsets(grid).to(value.dtype)
        mixed = torch.einsum('bthk,bkv->bthv', query, content.mT @ value)
        # q e first: [T, T] per head is smaller than T matrices [|k|, D/h].
        weights = torch.einsum('bthk,tsk->bhts', query, offsets)
        return (mixed + (weights @ value.unsqueeze(1)).transpose(1, 2)).flatten(2)

    def _offsets(self, grid: Sequence[int]) -> Tensor:
        largest = self._required_grid()
        if len(grid) != len(largest) or any(a > b for a, b in zip(grid, largest, strict=True)):
            raise ValueError(
                f'grid must be at most that of the learned offsets, {largest}, got {tuple(grid)}'
            )
        tokens = torch.arange(prod(grid), device=self.pos_embed.device)
        index = kernel_index(tokens[:, None], tokens, self.pos_embed.shape[:-1], grid)
        return self.pos_embed.flatten(0, -2)[index]


def _normalize(norm: nn.BatchNorm1d, x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return x [B, T, C] after batch norm, in float32; hidden tokens are 0."""
    if key_mask is None or not norm.training:  # then each token is normalised alone
        normed: Tensor = norm(x.flatten(0, 1)).view(x.shape)
        return normed if key_mask is None else normed.masked_fill(~key_mask.unsqueeze(-1), 0)
    visible = x[key_mask]
    if not len(visible):
        return torch.zeros_like(x)
    normed = norm(visible)
    return x.new_zeros(x.shape, dtype=normed.dtype).masked_scatter(key_mask.unsqueeze(-1), normed)


def _softmax_over_tokens(key: Tensor) -> Tensor:
    key = key if key.dtype == torch.float64 else key.float()
    some = (key > -torch.inf).any(1, keepdim=True)
    return key.masked_fill(~some, 0).softmax(1) * some
