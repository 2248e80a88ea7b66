"""How the products of AFT-full and AFT-local are cut, and their launches."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..geometry import as_pair, near_radius
from . import bias as bias_kernels
from . import fix_up, product, terms
from .bias import Bias, Form, Tokens, Where
from .common import count_processors, strided
from .support import constant

ROWS_WEIGHED = 16
SUMS_AT_ONCE = 64
# Targets and sources that `fix_up.py` weighs at once, 4 numbers of a thread.
SOME = 4
# Programs of `fix_up.py`; and of the gradient of w, whose channels are shared out if it has fewer.
FIXING_PER_PROCESSOR = 4
PROGRAMS_PER_PROCESSOR = 2


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


# By the operands and the major compute capability, 0 for all others. A stage takes 32 KiB, of tf32x3
# 8 or 16: the least of the devices served have 99 KiB. Only the products of Hopper take operands
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
    """That for values of the type; `save` keeps what gradients need (`product.py`)."""
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


def _saved_shapes(value: Tensor, band: Band, width: int) -> list[tuple[int, ...]]:
    batch, _, channels = value.shape
    tokens = batch, band.targets, channels
    tiles = max(band.tiles, band.source_tiles) if band.causal else 1
    flags = batch, band.tiles, triton.cdiv(channels, width)
    return [tokens, tokens, tokens, (batch, tiles, channels), (band.targets,), flags]


def new_saved(value: Tensor, band: Band, width: int) -> Tensor:
    """Room for a :class:`Saved`."""
    count = sum(map(math.prod, _saved_shapes(value, band, width)))
    return torch.empty(count, dtype=torch.float32, device=value.device)


def split_saved(saved: Tensor, value: Tensor, band: Band, width: int) -> Saved:
    """The views of what is saved."""
    shapes = _saved_shapes(value, band, width)
    parts = saved.split([math.prod(shape) for shape in shapes])
    return Saved(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


def _tokens(x: Tensor | None) -> Tokens | None:
    return None if x is None else Tokens(x, *x.stride())


class Call(NamedTuple):
    """The inputs of a product and how it is cut."""

    query: Tensor | None
    key: Tensor
    value: Tensor
    table: Tensor
    key_mask: Tensor | None
    gate: str
    band: Band
    cut: Cut

    @property
    def source(self) -> tuple:
        """Key, value and mask as the kernels take them."""
        return _tokens(self.key), _tokens(self.value), strided(self.key_mask)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that every kernel takes."""
        return dict(channels=self.value.shape[2], batches=len(self.value))

    @property
    def parts(self) -> int:
        """Blocks of channels."""
        return triton.cdiv(self.value.shape[2], self.cut.width)

    @property
    def place(self) -> dict:
        """Where w is."""
        return dict(bias=self.band.place(self.table), FORM=self.band.form)

    def programs(self, tiles: int) -> tuple[int]:
        """One for each of so many tiles, block of channels and sequence."""
        return (tiles * len(self.value) * self.parts,)

    def persistent(self) -> tuple[int]:
        """As many as stay on the device."""
        return (FIXING_PER_PROCESSOR * count_processors(self.value.device),)


def _units(saved: Saved, call: Call) -> Tensor:
    """Write the units of all tiles; the place of the first visible key [B, D]."""
    batch, tokens, channels = call.key.shape
    shape = batch, call.band.source_tiles, channels
    maxima = call.key.new_empty(shape, dtype=torch.float32)
    firsts = call.key.new_empty(shape, dtype=torch.int32)
    terms.key_maxima[call.programs(call.band.source_tiles)](
        _tokens(maxima),
        firsts,
        _tokens(call.key),
        strided(call.key_mask),
        tokens=tokens,
        TILE=call.cut.tile,
        WIDTH=call.cut.width,
        num_warps=call.cut.warps,
        **call.sizes,
    )
    if call.band.causal:
        torch.cummax(maxima, 1, out=(saved.units, torch.empty_like(maxima, dtype=torch.int64)))
    else:
        torch.amax(maxima, 1, keepdim=True, out=saved.units)
    return firsts.amin(1)


def _tile_units(saved: Saved, band: Band) -> Tokens:
    """The unit of each tile; that of the sequence unless the op is causal."""
    batch, tile, channel = saved.units.stride()
    return Tokens(saved.units, batch, tile if band.causal else 0, channel)


def _new_terms(
    call: Call, tiles: int, summed: bool, by_token: bool
) -> tuple[Tokens, Tensor | None]:
    """Room for terms [B, tokens, N], with the numbers of a token or of a channel side by side.

    tf32 operands of a product come fastest along what it sums over.
    """
    batch, numbers = len(call.value), call.parts * 2 * call.cut.width
    shape = (tiles * call.cut.tile, numbers) if by_token else (numbers, tiles * call.cut.tile)
    x = call.value.new_empty(batch, *shape, dtype=call.cut.operand)
    sums = call.value.new_empty(batch, tiles, numbers, dtype=torch.float32) if summed else None
    return _tokens(x if by_token else x.transpose(1, 2)), sums


def _key_terms(
    call: Call, units: Tokens, summed: bool, by_token: bool
) -> tuple[Tokens, Tensor | None]:
    tiles = call.band.source_tiles
    x, sums = _new_terms(call, tiles, summed, by_token)
    terms.key_terms[call.programs(tiles)](
        x,
        _tokens(sums),
        call.source,
        units,
        tokens=call.band.sources,
        TILE=call.cut.tile,
        WIDTH=call.cut.width,
        num_warps=call.cut.warps,
        **call.sizes,
    )
    return x, sums


def _running(sums: Tensor | None, units: Tokens, call: Call, reverse: bool) -> Tokens | None:
    """Sums over all tiles up to each one, or from each one on."""
    if sums is None:
        return None
    batch, tiles, numbers = sums.shape
    totals = torch.empty_like(sums)
    blocks = numbers // SUMS_AT_ONCE
    terms.running_sums[(batch * blocks,)](
        totals,
        _tokens(sums),
        units,
        tiles=tiles,
        channels=call.value.shape[2],
        blocks=blocks,
        CAUSAL=call.band.causal,
        REVERSED=reverse,
        SIZE=SUMS_AT_ONCE,
        num_warps=2,
    )
    return _tokens(totals)


def _operand(
    call: Call, x: Tokens, sums: Tensor | None, units: Tokens, shifts: Tensor, transposed: bool
) -> product.Operand:
    """W, or Wᵀ, and what it is multiplied with; sums of the tiles that no W covers."""
    band, tile = call.band, call.cut.tile
    rows, others = band.tiles, band.source_tiles
    if transposed:
        rows, others = others, rows
    width = tile * (others if band.window is None else band.reach)
    weights = call.value.new_empty(rows * tile, width, dtype=call.cut.operand)
    bias_kernels.weigh[(rows * tile // ROWS_WEIGHED,)](
        weights,
        shifts,
        where=band.where(transposed),
        width=width,
        TRANSPOSED=transposed,
        ROWS=ROWS_WEIGHED,
        STEP=min(tile, 64),
        **call.place,
    )
    past = future = None
    if not (band.causal and transposed):
        past = _running(sums, units, call, reverse=False)
    if transposed or not band.causal:
        future = _running(sums, units, call, reverse=True)
    return product.Operand((weights, width), x, units, past, future)


def product_forward(call: Call, save: bool) -> tuple[Tensor, Tensor]:
    """Output [B, T, D], and with `save` what its gradient needs."""
    value, band, width = call.value, call.band, call.cut.width
    batch, _, channels = value.shape
    output = torch.empty(
        (batch, band.targets, channels), dtype=value.dtype, device=value.device
    )
    kept = new_saved(value, band, width) if save else value.new_empty(0, dtype=torch.float32)
    if batch == 0:
        return output, kept
    if save:
        saved = split_saved(kept, value, band, width)
    else:
        shapes = _saved_shapes(value, band, width)[3:]
        parts = (value.new_empty(shape, dtype=torch.float32) for shape in shapes)
        saved = Saved(None, None, None, *parts)
    with torch.cuda.device_of(value):
        firsts = _units(saved, call)
        units = _tile_units(saved, band)
        by_token = call.cut.operand != torch.float32
        x, sums = _key_terms(call, units, band.far, by_token)
        operand = _operand(call, x, sums, units, saved.shifts, transposed=False)
        tensors = output, saved.flags, saved.mean, saved.log, saved.unit
        result = product.Result(*map(_tokens, tensors))
        settings = dict(GATE=call.gate, FORM=band.form, **call.sizes)
        product.forward[call.programs(band.tiles)](
            result,
            _tokens(call.query),
            operand,
            saved.shifts,
            firsts,
            band.where(),
            BLOCKS=call.cut.blocks,
            **settings,
            **call.cut.launch,
        )
        fix_up.fix_rows[call.persistent()](
            result,
            _tokens(call.query),
            call.source,
            band.place(call.table),
            saved.shifts,
            band.where(),
            WIDTH=width,
            SOME=SOME,
            num_warps=call.cut.warps,
            **settings,
        )
    return output, kept


def product_backward(
    gradient: Tensor | None, by_log: Tensor | None, kept: Tensor, call: Call, biased: bool
) -> list[Tensor | None]:
    """The gradients of query, key, value and, if `biased`, of the table.

    From those of the output and of λ, of which there must be one.
    """
    band, cut, value = call.band, call.cut, call.value
    results = [
        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (call.query, call.key, value)
    ]
    by_query, by_key, by_value = map(_tokens, results)
    if not len(value):
        return [*results, torch.zeros_like(call.table)]
    saved = split_saved(kept, value, band, cut.width)
    units = _tile_units(saved, band)
    tensors = saved.flags, saved.mean, saved.log, saved.unit, gradient, by_log
    result = product.Saved(*map(_tokens, tensors))
    with torch.cuda.device_of(value):
        x, sums = _new_terms(call, band.tiles, band.far, by_token=False)
        terms.target_terms[call.programs(band.tiles)](
            by_query,
            x,
            _tokens(sums),
            result,
            _tokens(call.query),
            saved.shifts,
            tokens=band.targets,
            GATE=call.gate,
            TILE=cut.tile,
            WIDTH=cut.width,
            num_warps=cut.warps,
            **call.sizes,
        )
        operand = _operand(call, x, sums, units, saved.shifts, transposed=True)
        product.backward[call.programs(band.source_tiles)](
            by_key,
            by_value,
            call.source,
            operand,
            band.where(transposed=True),
            FORM=band.form,
            BLOCKS=cut.blocks,
            **call.sizes,
            **cut.launch,
        )
        inputs = result, _tokens(call.query), call.source, band.place(call.table), saved.shifts
        settings = dict(
            GATE=call.gate,
            WIDTH=cut.width,
            SOME=SOME,
            FORM=band.form,
            num_warps=cut.warps,
            **call.sizes,
        )
        fix_up.fix_sources[call.persistent()](by_key, by_value, *inputs, band.where(), **settings)
        if not biased:
            return [*results, None]
        by_table = _bias_gradient(call, x, units, saved.shifts)
        fix_up.fix_bias[call.persistent()](
            band.place(by_table),
            *inputs,
            band.where(),
            pairs=band.tiles * band.reach,
            **settings,
        )
    return [*results, by_table.to(call.table.dtype)]


def share_out(steps: int, pairs: int, device: torch.device) -> tuple[int, int]:
    """Programs per tile of w, and steps of each."""
    wanted = PROGRAMS_PER_PROCESSOR * count_processors(device)
    each = triton.cdiv(steps, triton.cdiv(wanted, pairs))
    return triton.cdiv(steps, each), each


def _bias_gradient(call: Call, targets: Tokens, units: Tokens, shifts: Tensor) -> Tensor:
    """The gradient of w in the shape of the table, but for what flagged tiles add."""
    band, cut = call.band, call.cut
    sources, _ = _key_terms(call, units, summed=False, by_token=True)
    pairs = band.tiles * band.reach
    steps = len(call.value) * triton.cdiv(2 * call.value.shape[2], cut.step)
    parts, each = share_out(steps, pairs, call.value.device)
    # Zeros: what a table or a tile holds beyond the window, no program writes.
    shape = parts, *call.table.shape
    by_table = torch.zeros(shape, dtype=torch.float32, device=call.value.device)
    product.bias_gradient[(pairs * parts,)](
        band.place(by_table[0]),
        by_table.stride(0),
        band.place(call.table),
        targets,
        sources,
        units,
        shifts,
        band.where(),
        share=(each, steps, call.value.shape[2]),
        FORM=band.form,
        BLOCKS=cut.blocks,
        **cut.launch,
    )
    return by_table.sum(0) if parts > 1 else by_table[0]
