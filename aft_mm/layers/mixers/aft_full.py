"""AFT-full."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aft_mm import ops
from aft_mm.registry import MODELS

from ..grid import Grid
from ..position_bias import (
    FACTOR_STD,
    FREE_STD,
    FactorizedPositionBias,
    FreePositionBias,
    MemoryPositionBias,
)
from ..projections import ProjectedMemory
from .base import AFTMixer


class AFTFullState(NamedTuple):
    """State of :class:`AFTFull` between steps: that of the op, and w [T, T], computed once."""

    mixing: Any
    bias: Tensor

    @property
    def position(self) -> Tensor:
        """Index of the next token of each sequence, [B]."""
        position: Tensor = self.mixing.position
        return position


@MODELS.register_module()
class AFTFull(AFTMixer):
    """AFT with a dense position bias, ``w = u vᵀ`` or a free matrix (arXiv 2105.14103, eq. 2, 7).

    For a shorter sequence the bias is cropped, for another grid of an image interpolated.

    Args:
        embed_dims: Channels D.
        rank: d' of u and v; None for the free matrix.
        source_grid: Grid of a memory, for a cross mixer with :class:`MemoryPositionBias`; needs
            rank=None, causal=False, a gate, and no init_std.
        init_std: Standard deviation of u and v (default 0.1) or of the free w (default 0.01).
        **kwargs: See :class:`AFTMixer`; grid is required.
    """

    takes_memory = True
    takes_prefix_tokens = True
    state_type = AFTFullState

    def __init__(
        self,
        embed_dims: int,
        rank: int | None = 128,
        source_grid: Sequence[int] | None = None,
        init_std: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, **kwargs)
        grid = self._required_grid()
        if source_grid is not None and (rank is not None or self.causal or self.query is None):
            raise ValueError(
                'source_grid must be None except with rank=None, causal=False and a gate, got '
                f'rank={rank}, causal={self.causal} and gate={self.gate!r}'
            )
        if source_grid is not None and init_std is not None:
            raise ValueError(
                'init_std must be None with a source_grid, whose bias is initialised by distance, '
                f'got {init_std!r}'
            )
        self.pos_bias: FactorizedPositionBias | FreePositionBias | MemoryPositionBias
        if source_grid is not None:
            self.pos_bias = MemoryPositionBias(grid, source_grid, self.num_prefix_tokens)
        elif rank is None:
            self.pos_bias = FreePositionBias(
                grid, self.num_prefix_tokens, FREE_STD if init_std is None else init_std
            )
        else:
            self.pos_bias = FactorizedPositionBias(
                grid, rank, self.num_prefix_tokens, FACTOR_STD if init_std is None else init_std
            )
        self.biased_memory = source_grid is not None

    def position_bias(self) -> Tensor:
        """Return w [1, T, T], 0 for later tokens if causal, or [1, T, S] over a memory."""
        bias: Tensor = self.pos_bias()
        return (bias.tril() if self.causal else bias).unsqueeze(0)

    @torch.no_grad()
    def step_memory(self, x_t: Tensor, memory: ProjectedMemory, position: Tensor) -> Tensor:
        """Return :meth:`TokenMixer.step_memory` with row position [B] of w."""
        if not self.biased_memory:
            return super().step_memory(x_t, memory, position)
        # One row of W is a factor of e^k: AFT-simple with the keys k + w.
        key = memory.key + self.pos_bias()[position].unsqueeze(-1)
        query = None if self.query is None else self.query(x_t.unsqueeze(1))
        mixed = ops.aft_simple(query, key, memory.value, key_mask=memory.key_mask, gate=self.gate)
        output: Tensor = self.proj_drop(self.proj(mixed))
        return output.squeeze(1)

    @torch.no_grad()
    def select_state(self, state: AFTFullState, rows: Tensor) -> AFTFullState:
        return state._replace(mixing=super().select_state(state.mixing, rows))

    def _resolve_grid(self, num_tokens: int, grid: Sequence[int] | None = None) -> Grid:
        # A generated image begins with its first tokens.
        return (num_tokens,) if self.biased_memory else super()._resolve_grid(num_tokens, grid)

    def _mix(
        self, query: Tensor | None, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        if self.biased_memory:
            bias = self.pos_bias()[: grid[0]]
            return ops.aft_full(query, key, value, bias, key_mask=key_mask, gate=self.gate)
        # A memory may have another length.
        same = key.shape[1] == self.num_prefix_tokens + prod(grid)
        bias = self.pos_bias(grid, grid if same else self._resolve_grid(key.shape[1]))
        return ops.aft_full(
            query, key, value, bias, causal=self.causal, key_mask=key_mask, gate=self.gate
        )

    def _init_state(self, batch_size: int) -> AFTFullState:
        bias = self.pos_bias()
        state = ops.aft_full_init_state(
            batch_size, self.embed_dims, len(bias), **self._state_options
        )
        return AFTFullState(state, bias)

    def _prefill(
        self, state: AFTFullState, key: Tensor, value: Tensor, lengths: Tensor
    ) -> AFTFullState:
        return AFTFullState(ops.prefill(state.mixing, key, value, lengths), state.bias)

    def _mix_step(
        self, query: Tensor | None, key: Tensor, value: Tensor, state: AFTFullState
    ) -> tuple[Tensor, AFTFullState]:
        mixed, mixing = ops.aft_full_step(
            state.mixing, query, key, value, state.bias, gate=self.gate
        )
        return mixed, AFTFullState(mixing, state.bias)
