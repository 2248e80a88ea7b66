"""Tiles of a product: block sizes, which tiles meet, and the layout of saved tensors."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..geometry import near_radius
from .block_sizes import MatmulBlock, cdiv, find_block
from .online_softmax import strided
from .weights import BiasTable, Extents, MatmulForm

# Targets of a program that computes its own W.
LARGEST_OWN_TILE = 64


def choose_block(value: Tensor, save: bool, own: bool = False) -> MatmulBlock:
    """Return the block for the type of `value`, and for training if `save`.

    A program that computes its `own` W has more channels and fewer rows. float16 operands are not
    used: the smallest, 6e-8, is far above the smallest terms.
    """
    kind = 'tf32x3'
    if value.dtype == torch.bfloat16:
        kind = 'tf32' if save else 'bfloat16'
    block = find_block(f'product_{kind}', value.device)
    if not own:
        return block
    tile = min(block.tile, LARGEST_OWN_TILE)
    wanted = max(16, triton.next_power_of_2(value.shape[2]))
    return block._replace(tile=tile, width=min(block.width * block.tile // tile, wanted))


class TileBand(NamedTuple):
    """The tiles of tokens that meet; with window None all of them, with a dense w.

    Tiles within the window have a w; visible tokens outside them have W = 1. `shared`: each
    sequence has its own w, which depends only on the distance of two tokens; `own`: each has its
    own dense w.
    """

    window: tuple[int, ...] | None
    grid: tuple[int, ...] | None
    causal: bool
    targets: int
    sources: int
    tile: int
    shared: bool = False
    own: bool = False

    @property
    def tiles(self) -> int:
        return cdiv(self.targets, self.tile)

    @property
    def source_tiles(self) -> int:
        return cdiv(self.sources, self.tile)

    @property
    def radius(self) -> int:
        """Largest distance of two tokens in the window; −1 if it is empty."""
        assert self.window is not None
        return near_radius(self.window, self.grid)

    @property
    def before(self) -> int:
        if self.window is None:
            return max(self.tiles, self.source_tiles)
        before = cdiv(max(self.radius, 0), self.tile)
        # The shared tile holds the whole window, even beyond the sequence.
        return before if self.shared else min(before, self.tiles - 1)

    @property
    def after(self) -> int:
        return 0 if self.causal else self.before

    @property
    def reach(self) -> int:
        return self.source_tiles if self.window is None else self.before + 1 + self.after

    @property
    def has_outside(self) -> bool:
        """Whether some tile lies outside the window of another."""
        return self.window is not None and self.before + 1 < self.tiles

    def full_extents(self, extents: Extents) -> Extents:
        """Return the extents; if shared, those of a middle tile that meets as many as possible."""
        tokens = self.reach * self.tile
        return extents._replace(targets=tokens, sources=tokens) if self.shared else extents

    def locate(self, table: Tensor, pair_mask: Tensor | None = None) -> BiasTable:
        """Return the address of w in a table [T, S], [T, offsets] (shared [B, offsets]) or in tiles.

        An own table is [B, h, T, S], and tiles are [n, tile, reach · tile], of targets or if shared of sequences.
        """
        if self.own:
            each, head, row, column = table.stride()
            heads = table.shape[1], head
            return BiasTable(table, each, 0, row, column, 0, heads, strided(pair_mask))
        if table.dim() == 3:
            each, row, column = table.stride()
            batch_stride, tile_stride = (each, 0) if self.shared else (0, each)
            tile_stride -= self.tile * (row + column)  # targets and sources are counted from 0
            origin = self.before * self.tile * column
            return BiasTable(table, batch_stride, tile_stride, row, column, origin)
        row, column = table.stride()
        if self.window is None:
            return BiasTable(table, 0, 0, row, column, 0)
        # w[t, t'] of a window is in column radius + t' − t.
        batch_stride, target_stride = (row, -column) if self.shared else (0, row - column)
        return BiasTable(table, batch_stride, 0, target_stride, column, self.radius * column)


# A launch takes longer in Python than on the device, so these are cached.
@functools.lru_cache
def find_form(band: TileBand, block: MatmulBlock, group: int) -> MatmulForm:
    near = 'dense' if band.window is None else 'line' if band.grid is None else 'grid'
    tiles = band.causal, near, band.has_outside, band.shared, band.own, band.tile
    return MatmulForm(*tiles, block.width, block.step, block.precision, group)


@functools.lru_cache
def find_extents(band: TileBand, batches: int, channels: int, transposed: bool) -> Extents:
    """Return the sizes for kernels, `transposed` for tiles of sources that meet targets."""
    reach = (band.after, band.before) if transposed else (band.before, band.after)
    sizes = batches, channels, band.targets, band.sources, *reach
    if band.window is None:
        return Extents(*sizes, 0, 0, 0, 1)
    if band.grid is None:
        return Extents(*sizes, band.radius, 0, 0, 1)
    rows, columns = band.window
    return Extents(*sizes, 0, rows, columns, band.grid[1])


def make_band(
    table: Tensor,
    value: Tensor,
    window: Sequence[int] | None,
    grid: Sequence[int] | None,
    causal: bool,
    tile: int,
) -> TileBand:
    sources = value.shape[1]
    if window is None:
        own, targets = table.dim() == 4, table.shape[-2]
        return TileBand(None, None, causal, targets, sources, tile, own=own)
    return TileBand(
        tuple(window), None if grid is None else tuple(grid), causal, sources, sources, tile
    )


class SavedParts(NamedTuple):
    mean: Tensor | None
    log: Tensor | None
    units: Tensor
    centre: Tensor
    shifts: Tensor
    flags: Tensor


def saved_shapes(value: Tensor, band: TileBand, width: int) -> list[tuple[int, ...]]:
    batch, _, channels = value.shape
    tokens = batch, band.targets, channels
    tiles = max(band.tiles, band.source_tiles) if band.causal else 1
    flags = batch, band.tiles, cdiv(channels, width)
    shifts = batch if band.shared else batch * band.targets if band.own else band.targets
    return [tokens, tokens, (batch, tiles, channels), (batch, 1, channels), (shifts,), flags]


def new_saved(value: Tensor, band: TileBand, width: int, save: bool = True) -> Tensor:
    shapes = saved_shapes(value, band, width) if save else []
    return value.new_empty(sum(map(math.prod, shapes)), dtype=torch.float32)


def split_saved(saved: Tensor, value: Tensor, band: TileBand, width: int) -> SavedParts:
    """Return views of `saved`; if that is empty, new tensors for what the forward pass needs."""
    shapes = saved_shapes(value, band, width)
    if not saved.numel():
        parts = (value.new_empty(shape, dtype=torch.float32) for shape in shapes[2:])
        return SavedParts(None, None, *parts)
    flat = saved.split([math.prod(shape) for shape in shapes])
    return SavedParts(*(part.view(shape) for part, shape in zip(flat, shapes, strict=True)))
