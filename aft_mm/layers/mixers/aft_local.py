"""AFT-local."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aft_mm.ops.checks import check_window
from aft_mm.ops.geometry import near_mask
from aft_mm.registry import MODELS

from ..grid import Grid
from ..position_bias import (
    FACTOR_STD,
    FREE_STD,
    FactorizedPositionBias,
    FreeLocalPositionBias,
)
from .base import OpMixer


@MODELS.register_module()
class AFTLocal(OpMixer):
    """AFT with ``w = u vᵀ`` in a window and w = 0 outside it (arXiv 2105.14103, eq. 4 and 7).

    Sequences may be shorter, and images may have another grid; the window keeps its size in tokens.

    Args:
        embed_dims: Channels D.
        window: s of ``|t − t'| < s``, 0 for AFT-simple; on a 2-d grid an int or (s_r, s_c).
        rank: d' of u and v; None for a free w in a 1-d window.
        init_std: Standard deviation of u and v (default 0.1) or of the free w (default 0.01).
        **kwargs: See :class:`AFTMixer`; grid, of 1 or 2 dimensions, is required.
    """

    example = dict(window=2)
    op = 'aft_local'

    def __init__(
        self,
        embed_dims: int,
        window: int | Sequence[int],
        rank: int | None = 128,
        init_std: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, **kwargs)
        if self.grid is None or len(self.grid) > 2:
            raise ValueError(
                f'grid must have 1 or 2 dimensions for {type(self).__name__}, got {self.grid}'
            )
        check_window(window, self.grid)
        self.window = tuple(window) if isinstance(window, Sequence) else window
        self.pos_bias: FactorizedPositionBias | FreeLocalPositionBias
        if rank is None:
            std = FREE_STD if init_std is None else init_std
            self.pos_bias = FreeLocalPositionBias(self.grid, self.window, self.causal, std)
        else:
            std = FACTOR_STD if init_std is None else init_std
            self.pos_bias = FactorizedPositionBias(self.grid, rank, init_std=std)

    def position_bias(self) -> Tensor:
        """Return w [1, T, T], 0 outside the window and, if causal, for later tokens."""
        token = torch.arange(self.pos_bias.num_tokens, device=self._device)
        near = near_mask(token[:, None], token, self.window, self.grid)
        bias: Tensor = self.pos_bias().masked_fill(~near, 0)
        return (bias.tril() if self.causal else bias).unsqueeze(0)

    def _op_options(self, grid: Grid | None) -> dict[str, Any]:
        return dict(window=self.window, grid=grid)

    def _op_bias(self, grid: Grid | None = None) -> Sequence[Tensor | None]:
        return self.pos_bias.factors(grid)
