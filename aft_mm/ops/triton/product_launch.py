"""The launches of the products of AFT-full and AFT-local."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import bias as bias_kernels
from . import fix_up, product, terms
from .bias import Tokens
from .common import count_processors, strided
from .product_cut import Band, Cut, Saved, saved_shapes, split_saved

ROWS_WEIGHED = 16
SUMS_AT_ONCE = 64
# Targets and sources that `fix_up.py` weighs at once, 8 numbers of a thread. Left to itself the
# assembler spills a few of them to have more programs at a time.
SOME = 4
FIXING_REGISTERS = 168
# Programs of `fix_up.py`; and of the gradient of w, whose channels are shared out if it has fewer.
FIXING_PER_PROCESSOR = 4
# Sources of a program of the gradient of w: with 128, all of a tile, registers spill.
SIDE = 64
PROGRAMS_PER_PROCESSOR = 2


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


def product_forward(call: Call, kept: Tensor | None) -> Tensor:
    """Output [B, T, D]; what its gradient needs goes into `kept`, if there is room for it."""
    value, band, width = call.value, call.band, call.cut.width
    batch, _, channels = value.shape
    shape = batch, band.targets, channels
    output = torch.empty(shape, dtype=value.dtype, device=value.device)
    if batch == 0:
        return output
    if kept is not None:
        saved = split_saved(kept, value, band, width)
    else:
        shapes = saved_shapes(value, band, width)[3:]
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
            maxnreg=FIXING_REGISTERS,
            **settings,
        )
    return output


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
            maxnreg=FIXING_REGISTERS,
            FORM=band.form,
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
    side = min(cut.tile, SIDE)
    pairs = band.tiles * band.reach * (cut.tile // side)
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
        SIDE=side,
        **cut.launch,
    )
    return by_table.sum(0) if parts > 1 else by_table[0]
