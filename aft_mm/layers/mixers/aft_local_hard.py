from collections.abc import Sequence
from typing import Any

from torch import Tensor

from aft_mm.ops.checks import check_hard_window
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import OpMixer


@MODELS.register_module()
class AFTLocalHard(OpMixer):
    """AFT in a hard window, W = 1 inside and 0 outside, see :func:`aft_mm.ops.aft_local_hard`.

    Args:
        window: s, 1 or larger; on a 2-d grid an even int or pair (s_h, s_w).
        causal: See :class:`TokenMixer`; True by default, as in the paper.
    """

    example = dict(window=4)
    op = 'aft_local_hard'

    def __init__(
        self, embed_dims: int, window: int | Sequence[int], causal: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(embed_dims, causal=causal, **kwargs)
        if self.grid is not None and len(self.grid) > 2:
            raise ValueError(f'grid must have 1 or 2 dimensions for AFTLocalHard, got {self.grid}')
        check_hard_window(window, self.grid)
        self.window = tuple(window) if isinstance(window, Sequence) else window

    def _mix(
        self, query: Tensor | None, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        if self.causal and self.grid is None and len(grid) > 1:
            raise ValueError(
                'grid must be given to the constructor of AFTLocalHard(causal=True) for a raster, '
                f'whose steps need it, got {grid} for these tokens only'
            )
        return super()._mix(query, key, value, grid, key_mask)

    def _op_options(self, grid: Grid | None) -> dict[str, Any]:
        return dict(window=self.window, grid=grid)
