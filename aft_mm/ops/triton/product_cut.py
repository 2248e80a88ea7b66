"""How a product is cut: which block it takes, which tiles meet which, and what is kept."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..geometry import as_pair, near_radius
from .bias import Bias, Form, Where
from .blocks import ProductBlock, find_block


def choose_cut(value: Tensor, save: bool) -> ProductBlock:
    """That for values of the type; `save` keeps what gradients need (`product.py`).

    float16 ends at 6e-8, far above the smallest terms, and tf32 cuts operands to its 10 bits.
    """
    kind = 'tf32x3'
    if value.dtype == torch.bfloat16:
        kind = 'tf32' if save else 'bfloat16'
    return find_block(f'product_{kind}', value.device)


class Band(NamedTuple):
    """Which tokens meet which, in tiles; window None: all, with a dense w.

    Tiles within the window have a w; visible tokens beyond them have W = 1, `far` if there are any.
    `shared`: each sequence has a w of its own, which says for all tokens how one sees another.
    """

    window: tuple[int, ...] | None
    grid: tuple[int, ...] | None
    causal: bool
    targets: int
    sources: int
    tile: int
    shared: bool = False

    @property
    def tiles(self) -> int:
        """Tiles of targets."""
        return triton.cdiv(self.targets, self.tile)

    @property
    def source_tiles(self) -> int:
        """Tiles of sources."""
        return triton.cdiv(self.sources, self.tile)

    @property
    def radius(self) -> int:
        """The largest distance of two tokens in the window; −1 if it is empty."""
        return near_radius(self.window, self.grid)

    @property
    def before(self) -> int:
        """Tiles of sources before the own one that meet it."""
        if self.window is None:
            return max(self.tiles, self.source_tiles)
        before = triton.cdiv(max(self.radius, 0), self.tile)
        # The shared tile holds all of the window, also what no token of a sequence sees.
        return before if self.shared else min(before, self.tiles - 1)

    @property
    def after(self) -> int:
        """Tiles of sources after the own one that meet it."""
        return 0 if self.causal else self.before

    @property
    def reach(self) -> int:
        """Tiles of sources in the W of a tile of targets."""
        return self.source_tiles if self.window is None else self.before + 1 + self.after

    @property
    def far(self) -> bool:
        """Whether some tile lies beyond the window of another."""
        return self.window is not None and self.before + 1 < self.tiles

    @property
    def form(self) -> Form:
        """What kernels are specialised for."""
        near = 'dense' if self.window is None else 'line'
        if self.grid is not None and len(self.grid) == 2:
            near = 'grid'
        return Form(self.causal, near, self.far, self.shared, self.tile)

    def where(self, batches: int, channels: int, transposed: bool = False) -> Where:
        """What kernels are told; `transposed`: how many targets a tile of sources meets."""
        reach = (self.after, self.before) if transposed else (self.before, self.after)
        sizes = batches, channels, self.targets, self.sources, *reach
        if self.window is None:
            return Where(*sizes, 0, 0, 0, 1)
        if self.grid is None or len(self.grid) == 1:
            return Where(*sizes, self.radius, 0, 0, 1)
        return Where(*sizes, 0, *as_pair(self.window), self.grid[1])

    def whole(self, where: Where) -> Where:
        """The same, or if shared around a middle tile that meets as many as a tile can."""
        tokens = self.reach * self.tile
        return where._replace(targets=tokens, sources=tokens) if self.shared else where

    def place(self, table: Tensor) -> Bias:
        """w in a table [T, S], [T, offsets], if shared [B, offsets], or of tiles as below."""
        if table.dim() == 3:
            return self.place_tiles(table)
        row, column = table.stride()
        if self.window is None:
            return Bias(table, 0, 0, row, column, 0)
        # w[t, t'] of a window stands in column radius + t' − t.
        by_batch, by_target = (row, -column) if self.shared else (0, row - column)
        return Bias(table, by_batch, 0, by_target, column, self.radius * column)

    def place_tiles(self, table: Tensor) -> Bias:
        """w in tiles [n, tile, reach · tile], n of targets or if shared of sequences."""
        each, row, column = table.stride()
        by_batch, by_tile = (each, 0) if self.shared else (0, each)
        by_tile -= self.tile * (row + column)  # targets and sources are counted from the first on
        return Bias(table, by_batch, by_tile, row, column, self.before * self.tile * column)


def make_band(
    table: Tensor,
    value: Tensor,
    window: Sequence[int] | None,
    grid: Sequence[int] | None,
    causal: bool,
    tile: int,
) -> Band:
    """The band of a table over the tokens of `value`."""
    sources = value.shape[1]
    if window is None:
        return Band(None, None, causal, len(table), sources, tile)
    return Band(tuple(window), grid and tuple(grid), causal, sources, sources, tile)


class Saved(NamedTuple):
    """What the gradient needs: mean, λ and its unit, units of tiles, shifts of w and flags.

    Views of one tensor, which is what an op may keep.
    """

    mean: Tensor
    log: Tensor
    unit: Tensor
    units: Tensor
    shifts: Tensor
    flags: Tensor


def saved_shapes(value: Tensor, band: Band, width: int) -> list[tuple[int, ...]]:
    """The shapes of a :class:`Saved`."""
    batch, _, channels = value.shape
    tokens = batch, band.targets, channels
    tiles = max(band.tiles, band.source_tiles) if band.causal else 1
    flags = batch, band.tiles, triton.cdiv(channels, width)
    shifts = batch if band.shared else band.targets
    return [tokens, tokens, tokens, (batch, tiles, channels), (shifts,), flags]


def count_saved(value: Tensor, band: Band, width: int) -> int:
    """How many numbers a :class:`Saved` has."""
    return sum(map(math.prod, saved_shapes(value, band, width)))


def new_saved(value: Tensor, band: Band, width: int) -> Tensor:
    """Room for a :class:`Saved`."""
    return value.new_empty(count_saved(value, band, width), dtype=torch.float32)


def split_saved(saved: Tensor, value: Tensor, band: Band, width: int) -> Saved:
    """The views of what is saved."""
    shapes = saved_shapes(value, band, width)
    parts = saved.split([math.prod(shape) for shape in shapes])
    return Saved(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))
