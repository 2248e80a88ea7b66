from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from aft_mm import ops
from aft_mm.ops.checks import check_num_heads
from aft_mm.registry import MODELS

from ..grid import Grid
from ..position_bias import (
    FACTOR_STD,
    FREE_STD,
    FUNCTIONS,
    TABLES,
    DistancePositionBias,
    FactorizedPositionBias,
    FreePositionBias,
    MemoryPositionBias,
    learned_grid,
    nearest_pairs,
)
from ..projections import ProjectedMemory
from .base import AFTMixer, BiasedState


@MODELS.register_module()
class AFTFull(AFTMixer):
    """AFT with a dense position bias, ``w = u vᵀ`` or a free matrix (arXiv 2105.14103, eq. 2, 7).

    For a shorter sequence the bias is cropped, for another grid of an image interpolated.
    A longer sequence needs `longer`.

    Args:
        rank: d' of u and v; None for the free matrix.
        source_grid: Grid of a memory, for a cross mixer with :class:`MemoryPositionBias`; needs
            rank=None, causal=False, a gate, and no init_std.
        init_std: Standard deviation of u and v (default 0.1) or of the free w (default 0.01).
        longer: w of a longer sequence (docs/mixers.md): None refuses it, 'nearest' or
            'interpolate', or 'linear' or 'log' for a :class:`DistancePositionBias`.
        trained_length: Tokens T₀ of the learned w, if the grid is longer.
        num_heads: h of the slopes of 'linear' and 'log', a divisor of D.
        **kwargs: See :class:`AFTMixer`; grid is required.
    """

    takes_memory = True
    takes_prefix_tokens = True
    state_type = BiasedState

    def __init__(
        self,
        embed_dims: int,
        rank: int | None = 128,
        source_grid: Sequence[int] | None = None,
        init_std: float | None = None,
        longer: str | None = None,
        trained_length: int | None = None,
        num_heads: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, **kwargs)
        grid = self._required_grid()
        learned = learned_grid(grid, longer, trained_length, (*TABLES, *FUNCTIONS))
        if longer is not None and (source_grid is not None or self.num_prefix_tokens):
            raise ValueError(
                'longer must be None with a source_grid or prefix tokens, got '
                f'{longer!r} with source_grid={source_grid} and {self.num_prefix_tokens} prefix tokens'
            )
        if longer in FUNCTIONS:
            if rank != 128 or init_std is not None:
                raise ValueError(
                    f'rank and init_std must be left at their defaults with longer={longer!r}, '
                    f'got {rank} and {init_std}'
                )
            if num_heads is None:
                raise ValueError(f'num_heads must be given with longer={longer!r}, got None')
            check_num_heads(num_heads, embed_dims)
        elif num_heads is not None:
            raise ValueError(
                f"num_heads must be None except with longer='linear' or 'log', got {num_heads}"
            )
        self.longer = longer
        self.num_heads = num_heads
        self.depends_on_length = longer == 'interpolate'
        stretched = grid[0] if longer == 'interpolate' else None
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
        self.pos_bias: Any
        if num_heads is not None and longer is not None:
            self.pos_bias = DistancePositionBias(num_heads, longer)
        elif source_grid is not None:
            self.pos_bias = MemoryPositionBias(grid, source_grid, self.num_prefix_tokens)
        elif rank is None:
            std = FREE_STD if init_std is None else init_std
            self.pos_bias = FreePositionBias(learned, self.num_prefix_tokens, std, stretched)
        else:
            std = FACTOR_STD if init_std is None else init_std
            options = self.num_prefix_tokens, std, stretched
            self.pos_bias = FactorizedPositionBias(learned, rank, *options)
        self.biased_memory = source_grid is not None

    def position_bias(self) -> Tensor:
        """Return the learned w [1, T, T] or [1, T, S], with slopes by offset, [h, 2T − 1]."""
        if self.num_heads is not None:
            slopes: Tensor = self.pos_bias(self._required_grid(), by_offset=True)
            return slopes
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
        bias = self._bias(grid, None if same else self._resolve_grid(key.shape[1]))
        options: dict[str, Any] = dict(num_heads=self.num_heads, causal=self.causal)
        return ops.aft_full(query, key, value, bias, key_mask=key_mask, gate=self.gate, **options)

    def _bias(self, grid: Grid, source_grid: Grid | None = None) -> Tensor:
        """Return w [T, S] or [h, T, S] for targets on `grid` and sources on `source_grid`."""
        if self.longer == 'nearest':
            targets, sources = grid[0], (source_grid or grid)[0]
            if max(targets, sources) > self.pos_bias.num_tokens:
                return nearest_pairs(self.pos_bias(), targets, sources)
        bias: Tensor = self.pos_bias(grid, source_grid)
        return bias

    def _init_state(self, batch_size: int) -> BiasedState:
        grid, options = self._required_grid(), self._state_options
        if self.num_heads is not None:
            # Keys have a bias per channel, as those of AFT-conv with D heads.
            kernel = self.pos_bias(grid, by_offset=True)
            bias = kernel.repeat_interleave(self.embed_dims // self.num_heads, 0)
            options |= dict(num_heads=self.embed_dims, kernel_size=kernel.shape[1:], grid=grid)
            state = ops.aft_conv_init_state(batch_size, self.embed_dims, **options)
        else:
            bias = self._bias(grid)
            state = ops.aft_full_init_state(batch_size, self.embed_dims, len(bias), **options)
        return BiasedState(state, (bias,))

    def _mix_step(
        self, query: Tensor | None, key: Tensor, value: Tensor, state: BiasedState
    ) -> tuple[Tensor, BiasedState]:
        tensors, gate = (state.mixing, query, key, value, *state.bias), self.gate
        if self.num_heads is None:
            mixed, mixing = ops.aft_full_step(*tensors, gate=gate)
        else:
            mixed, mixing = ops.aft_conv_step(*tensors, grid=self._required_grid(), gate=gate)
        return mixed, state._replace(mixing=mixing)
