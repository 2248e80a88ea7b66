"""Position biases of sequences that are longer than the learned ones."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aft_mm.checks import check_choice, check_int
from aft_mm.ops.geometry import neighbours, split
from aft_mm.ops.tracing import no_autocast

from .grid import Grid
from .resetting import Resettable

# Choices of `longer` that keep a learned table, and those that replace it by a function.
TABLES = ('nearest', 'interpolate')
FUNCTIONS = ('linear', 'log')


def learned_grid(
    grid: Grid, longer: str | None, trained_length: int | None, choices: Sequence[str]
) -> Grid:
    if longer is not None:
        check_choice('longer', longer, choices)
        if len(grid) > 1:
            raise ValueError(
                f'longer must be None on a grid of {len(grid)} dimensions, got {longer!r}'
            )
    if trained_length is None:
        return grid
    check_int('trained_length', trained_length, 1)
    if longer not in TABLES or trained_length > grid[0]:
        raise ValueError(
            "trained_length must be at most T of the grid, with longer='nearest' or 'interpolate', "
            f'got {trained_length} with grid {grid} and longer={longer!r}'
        )
    return (trained_length,)


def nearest_pairs(bias: Tensor, targets: int, sources: int) -> Tensor:
    """Return w [T, S] from the learned w [n, n]: that of the nearest pair at the same distance.

    Of distances that were not learned it is w of the largest distance.
    """
    target, source = _nearest(_range(bias, targets)[:, None], _range(bias, sources), len(bias))
    return bias[target, source]


def nearest_band(band: Tensor, reach: int, length: int) -> Tensor:
    """Return :func:`nearest_pairs` in a window: rows [T, K] from the learned rows [n, K].

    Column ``reach + (t' − t)`` of row t is w[t, t'].
    """
    target = _range(band, length)[:, None]
    column = _range(band, band.shape[1])
    target, source = _nearest(target, target + column - reach, len(band))
    return band[target, reach + source - target]


def _range(like: Tensor, end: int) -> Tensor:
    return torch.arange(end, device=like.device)


def _nearest(target: Tensor, source: Tensor, learned: int) -> tuple[Tensor, Tensor]:
    back = (torch.maximum(target, source) - (learned - 1)).clamp_min(0)
    return (target - back).clamp_min(0), (source - back).clamp_min(0)


def factor_band(pos_u: Tensor, pos_v: Tensor, reach: int, causal: bool) -> Tensor:
    """Return the rows [n, K] of :func:`nearest_band` of ``w = u vᵀ``, in O(n·K) memory."""
    block, columns = reach + 1, reach + 1 if causal else 2 * reach + 1
    with no_autocast(pos_u):
        around = neighbours(pos_v, block, 1, 0 if causal else 1)
        tiles = torch.bmm(split(pos_u, block), around.mT)
    # Row i of a block starts at its token i − reach, a block after the first column of the tile.
    index = _range(pos_u, block)[:, None] + 1 + _range(pos_u, columns)
    return tiles.gather(2, index.expand(len(tiles), -1, -1)).flatten(0, 1)[: len(pos_u)]


def decreasing_slopes(count: int) -> Tensor:
    """Return the slopes ``2^(−8 i / n)`` for i = 1 … n (arXiv 2108.12409), from steep to flat."""
    return torch.exp2(-8 * torch.arange(1, count + 1) / count)


class DistancePositionBias(Resettable):
    """Bias that falls with the distance, ``w = −m |t − t'|`` or ``−m ln(1 + |t − t'|)``.

    The slope m > 0 of each head is learned. It starts as in :func:`decreasing_slopes`, with
    kind='log' eight times as steep. Any length is possible.

    Args:
        num_heads: h.
        kind: 'linear' or 'log'.
    """

    def __init__(self, num_heads: int, kind: str) -> None:
        super().__init__()
        check_int('num_heads', num_heads, 1)
        check_choice('kind', kind, FUNCTIONS)
        self.kind = kind
        slope = decreasing_slopes(num_heads) * (8 if kind == 'log' else 1)
        self.log_slope = nn.Parameter(slope.log())

    def forward(self, grid: Grid, source_grid: Grid | None = None) -> Tensor:
        """Return w [h, T, S] for targets on `grid` and sources on `source_grid`."""
        target = _range(self.log_slope, grid[0])[:, None]
        return self._at(target - _range(self.log_slope, (source_grid or grid)[0]))

    def kernel(self, length: int) -> Tensor:
        """Return w [h, 2T − 1] by offset, ``t' − t = 0`` in the middle, for T = length."""
        return self._at(_range(self.log_slope, 2 * length - 1) - (length - 1))

    def _at(self, offset: Tensor) -> Tensor:
        distance = offset.abs().to(self.log_slope.dtype)
        if self.kind == 'log':
            distance = distance.log1p()
        return -self.log_slope.exp().view(-1, *[1] * offset.dim()) * distance
