"""How a product is cut: tiles, blocks and steps by chip, what meets what, and what is kept."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..geometry import as_pair, near_radius
from . import product
from .bias import Bias, Form, Where
from .support import constant


class Cut(NamedTuple):
    """How a product is cut and multiplied.

    tile: tokens along a side of a tile of W; width: channels of a program, two numbers each; step:
    tokens, or numbers, of a product; stages: steps on the way while one is multiplied.
    """

    operand: torch.dtype
    precision: str
    tile: int
    width: int
    step: int
    warps: int
    stages: int

    @property
    def blocks(self) -> product.Blocks:
        """What the kernels are told."""
        return product.Blocks(self.width, self.step, self.precision, self.stages)

    @property
    def launch(self) -> dict[str, int]:
        """What Triton is told."""
        return dict(num_warps=self.warps, num_stages=self.stages)


# By the operands and the major compute capability, 0 for all others. A stage takes 32 KiB, for
# tf32x3 8 or 16: the least of the devices served have 99 KiB. Only products of Hopper take operands
# from shared memory; elsewhere both parts of tf32x3 are registers, which steps of 32 would spill.
CUTS = {
    ('bfloat16', 0): Cut(torch.bfloat16, 'tf32', 128, 64, 64, 8, 3),
    ('tf32', 0): Cut(torch.float32, 'tf32', 128, 64, 32, 8, 2),
    ('tf32x3', 0): Cut(torch.float32, 'tf32x3', 64, 32, 16, 4, 3),
    ('tf32x3', 9): Cut(torch.float32, 'tf32x3', 64, 32, 32, 4, 2),
}


@constant
def capability(device_type: str, index: int | None) -> int:
    """The major compute capability; 0 in the interpreter."""
    return torch.cuda.get_device_capability(index)[0] if device_type == 'cuda' else 0


def choose_cut(value: Tensor, save: bool) -> Cut:
    """That for values of the type; `save` keeps what gradients need (`product.py`).

    float16 ends at 6e-8, far above the smallest terms, and tf32 cuts operands to its 10 bits.
    """
    kind = 'tf32x3'
    if value.dtype == torch.bfloat16:
        kind = 'tf32' if save else 'bfloat16'
    return CUTS.get((kind, capability(value.device.type, value.device.index)), CUTS[kind, 0])


class Band(NamedTuple):
    """Which tokens meet which, in tiles; window None: all, with a dense w.

    Tiles within the window have a w; visible tokens beyond them have W = 1, `far` if there are any.
    """

    window: tuple[int, ...] | None
    grid: tuple[int, ...] | None
    causal: bool
    targets: int
    sources: int
    tile: int

    @property
    def tiles(self) -> int:
        """Tiles of targets."""
        return triton.cdiv(self.targets, self.tile)

    @property
    def source_tiles(self) -> int:
        """Tiles of sources."""
        return triton.cdiv(self.sources, self.tile)

    @property
    def before(self) -> int:
        """Tiles of sources before the own one that meet it."""
        if self.window is None:
            return max(self.tiles, self.source_tiles)
        radius = max(near_radius(self.window, self.grid), 0)
        return min(triton.cdiv(radius, self.tile), self.tiles - 1)

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
        return Form(self.causal, near, self.far, self.tile)

    def where(self, transposed: bool = False) -> Where:
        """What kernels are told; `transposed`: how many targets a tile of sources meets."""
        reach = (self.after, self.before) if transposed else (self.before, self.after)
        sizes = self.targets, self.sources, *reach
        if self.window is None:
            return Where(*sizes, 0, 0, 0, 1)
        if self.grid is None or len(self.grid) == 1:
            return Where(*sizes, near_radius(self.window, self.grid), 0, 0, 1)
        return Where(*sizes, 0, *as_pair(self.window), self.grid[1])

    def place(self, table: Tensor) -> Bias:
        """w in a table [T, S], [T, offsets] or of tiles [n, tile, reach · tile]."""
        if table.dim() == 3:
            return Bias(table, -self.tile, table.stride(1), 1, self.before * self.tile)
        row, column = table.stride()
        if self.window is None:
            return Bias(table, 0, row, column, 0)
        # w[t, t'] of a window stands in column radius + t' − t.
        radius = near_radius(self.window, self.grid)
        return Bias(table, 0, row - column, column, radius * column)


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
    return [tokens, tokens, tokens, (batch, tiles, channels), (band.targets,), flags]


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
