from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aft_mm import ops
from aft_mm.ops.checks import check_window
from aft_mm.ops.geometry import near_mask, near_radius
from aft_mm.registry import MODELS

from ..grid import Grid
from ..position_bias import (
    FACTOR_STD,
    FREE_STD,
    TABLES,
    FactorizedPositionBias,
    FreeLocalPositionBias,
    factor_band,
    learned_grid,
    nearest_band,
)
from .base import BiasedState, OpMixer


@MODELS.register_module()
class AFTLocal(OpMixer):
    """AFT with ``w = u vᵀ`` in a window and w = 0 outside it (arXiv 2105.14103, eq. 4 and 7).

    On another grid of an image the window keeps its size in tokens. A longer sequence needs
    `longer`.

    Args:
        window: s of ``|t − t'| < s``, 0 for AFT-simple; on a 2-d grid an int or (s_r, s_c).
        rank: d' of u and v; None for a free w in a 1-d window.
        init_std: See :class:`AFTFull`.
        longer, trained_length: 'nearest' or 'interpolate', see :class:`AFTFull`.
        **kwargs: See :class:`AFTMixer`; grid, of 1 or 2 dimensions, is required.
    """

    example = dict(window=2)
    op = 'aft_local'
    state_type = (ops.StepState, BiasedState)

    def __init__(
        self,
        embed_dims: int,
        window: int | Sequence[int],
        rank: int | None = 128,
        init_std: float | None = None,
        longer: str | None = None,
        trained_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, **kwargs)
        if self.grid is None or len(self.grid) > 2:
            raise ValueError(
                f'grid must have 1 or 2 dimensions for {type(self).__name__}, got {self.grid}'
            )
        check_window(window, self.grid)
        self.window = tuple(window) if isinstance(window, Sequence) else window
        learned = learned_grid(self.grid, longer, trained_length, TABLES)
        self.reach = near_radius(self.window, self.grid)
        if longer is not None and self.reach < 0:
            raise ValueError(f'window must be 1 or larger with longer={longer!r}, got {window}')
        self.longer = longer
        self.depends_on_length = longer == 'interpolate'
        stretched = self.grid[0] if longer == 'interpolate' else None
        self.pos_bias: FactorizedPositionBias | FreeLocalPositionBias
        if rank is None:
            std = FREE_STD if init_std is None else init_std
            options = self.window, self.causal, std, stretched
            self.pos_bias = FreeLocalPositionBias(learned, *options)
        else:
            std = FACTOR_STD if init_std is None else init_std
            self.pos_bias = FactorizedPositionBias(learned, rank, init_std=std, stretched=stretched)

    def position_bias(self) -> Tensor:
        """Return the learned w [1, T, T], 0 outside the window and, if causal, for later tokens."""
        token = torch.arange(self.pos_bias.num_tokens, device=self._device)
        near = near_mask(token[:, None], token, self.window, self.grid)
        bias: Tensor = self.pos_bias().masked_fill(~near, 0)
        return (bias.tril() if self.causal else bias).unsqueeze(0)

    def _op_options(self, grid: Grid | None) -> dict[str, Any]:
        return dict(window=self.window, grid=grid)

    def _op_bias(self, grid: Grid | None = None) -> Sequence[Tensor | None]:
        if self.longer != 'nearest' or grid is None or grid[0] <= self.pos_bias.num_tokens:
            operands: Sequence[Tensor | None] = self.pos_bias(grid, as_operands=True)
            return operands
        rows, pos_v = self.pos_bias(as_operands=True)
        if pos_v is not None:
            rows = factor_band(rows, pos_v, self.reach, self.causal)
        return (nearest_band(rows, self.reach, grid[0]),)

    def _init_state(self, batch_size: int) -> Any:
        state = super()._init_state(batch_size)
        if self.longer is None:
            return state
        return BiasedState(state, tuple(x for x in self._op_bias(self.grid) if x is not None))

    def _mix_step(
        self, query: Tensor | None, key: Tensor, value: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        if not isinstance(state, BiasedState):
            return super()._mix_step(query, key, value, state)
        step, options = getattr(ops, f'{self.op}_step'), self._op_options(self.grid)
        tensors = state.mixing, query, key, value, *state.bias
        mixed, mixing = step(*tensors, **options, gate=self.gate)
        return mixed, state._replace(mixing=mixing)
