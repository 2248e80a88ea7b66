"""The launches of the products of AFT-full, AFT-local and AFT-conv."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import bias as bias_kernels
from . import fix_up, product, terms
from .bias import Inputs, Shifts, Tokens
from .blocks import ProductBlock, count_processors
from .product_cut import Band, Saved, saved_shapes, split_saved
from .rows import strided

ROWS_WEIGHED = 16
SUMS_AT_ONCE = 64
# Targets and sources that `fix_up.py` weighs at once, 8 numbers of a thread. Left to itself the
# assembler spills a few of them to have more than two programs at a time; it takes up to 216.
SOME = 4
FIXING_REGISTERS = 224
# Programs of `fix_up.py`; and of the gradient of w, whose channels are shared out if it has fewer.
FIXING_PER_PROCESSOR = 2
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
    cut: ProductBlock

    def where(self, transposed: bool = False) -> bias_kernels.Where:
        """Sizes, and which tiles meet."""
        return self.band.where(len(self.value), self.value.shape[2], transposed)

    def inputs(self, shifts: Tensor) -> Inputs:
        """What the kernels read."""
        return Inputs(
            self.where(),
            _tokens(self.key),
            _tokens(self.value),
            self.band.place(self.table),
            Shifts(shifts, *((1, 0) if self.band.shared else (0, 1))),
            _tokens(self.query),
            strided(self.key_mask),
        )

    @property
    def parts(self) -> int:
        """Blocks of channels."""
        return triton.cdiv(self.value.shape[2], self.cut.width)

    @property
    def blocks(self) -> product.Blocks:
        """What the kernels of products are told."""
        cut = self.cut
        return product.Blocks(cut.width, cut.step, cut.precision, cut.stages)

    @property
    def launch(self) -> dict[str, int]:
        """What Triton is told of them."""
        return dict(num_warps=self.cut.warps, num_stages=self.cut.stages)

    @property
    def tile(self) -> dict[str, int]:
        """What the kernels of terms are told."""
        return dict(TILE=self.cut.tile, WIDTH=self.cut.width, num_warps=self.cut.warps)

    @property
    def fixing(self) -> dict:
        """What those of `fix_up.py` are told."""
        about = dict(GATE=self.gate, FORM=self.band.form, WIDTH=self.cut.width, SOME=SOME)
        return dict(maxnreg=FIXING_REGISTERS, **about)

    def programs(self, tiles: int) -> tuple[int]:
        """One for each of so many tiles, block of channels and sequence."""
        return (tiles * len(self.value) * self.parts,)

    def persistent(self) -> tuple[int]:
        """As many as stay on the device."""
        return (FIXING_PER_PROCESSOR * count_processors(self.value.device),)


def _units(saved: Saved, call: Call, inputs: Inputs) -> Tensor:
    """Write the units of all tiles; the place of the first visible key [B, D]."""
    batch, _, channels = call.value.shape
    shape = batch, call.band.source_tiles, channels
    maxima = call.key.new_empty(shape, dtype=torch.float32)
    firsts = call.key.new_empty(shape, dtype=torch.int32)
    programs = call.programs(call.band.source_tiles)
    terms.key_maxima[programs](_tokens(maxima), firsts, inputs, **call.tile)
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
    call: Call, inputs: Inputs, units: Tokens, summed: bool, by_token: bool
) -> tuple[Tokens, Tensor | None]:
    tiles = call.band.source_tiles
    x, sums = _new_terms(call, tiles, summed, by_token)
    terms.key_terms[call.programs(tiles)](x, _tokens(sums), inputs, units, **call.tile)
    return x, sums


def _running(sums: Tensor | None, units: Tokens, call: Call, reverse: bool) -> Tokens | None:
    """Sums over all tiles up to each one, or from each one on."""
    if sums is None:
        return None
    batch, tiles, numbers = sums.shape
    totals = torch.empty_like(sums)
    size = min(SUMS_AT_ONCE, 2 * call.cut.width)
    terms.running_sums[(batch * (numbers // size),)](
        totals,
        _tokens(sums),
        units,
        tiles=tiles,
        channels=call.value.shape[2],
        blocks=numbers // size,
        CAUSAL=call.band.causal,
        REVERSED=reverse,
        SIZE=size,
        num_warps=2,
    )
    return _tokens(totals)


def _operand(
    call: Call,
    inputs: Inputs,
    x: Tokens,
    sums: Tensor | None,
    units: Tokens,
    transposed: bool = False,
) -> product.Operand:
    """W, or Wᵀ, and what it is multiplied with; sums of the tiles that no W covers."""
    band, tile = call.band, call.cut.tile
    rows, others = band.tiles, band.source_tiles
    if transposed:
        rows, others = others, rows
    width = tile * (others if band.window is None else band.reach)
    owners, rows = (len(call.value), 1) if band.shared else (1, rows)
    weights = call.value.new_empty(owners * rows * tile, width, dtype=call.cut.operand)
    bias_kernels.weigh[(rows * tile // ROWS_WEIGHED, owners)](
        weights,
        inputs.shifts,
        inputs.bias,
        band.whole(call.where(transposed)),
        width=width,
        FORM=band.form,
        TRANSPOSED=transposed,
        ROWS=ROWS_WEIGHED,
        STEP=min(tile, 64),
    )
    past = future = None
    if not (band.causal and transposed):
        past = _running(sums, units, call, reverse=False)
    if transposed or not band.causal:
        future = _running(sums, units, call, reverse=True)
    each = (tile * width, 0) if band.shared else (0, tile * width)
    return product.Operand((weights, width, *each), x, units, past, future)


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
        inputs = call.inputs(saved.shifts)
        firsts = _units(saved, call, inputs)
        units = _tile_units(saved, band)
        by_token = call.cut.operand != torch.float32
        x, sums = _key_terms(call, inputs, units, band.far, by_token)
        operand = _operand(call, inputs, x, sums, units)
        tensors = output, saved.flags, saved.mean, saved.log, saved.unit
        result = product.Result(*map(_tokens, tensors))
        about = dict(FORM=band.form, GATE=call.gate, BLOCKS=call.blocks)
        product.forward[call.programs(band.tiles)](
            result, inputs, operand, firsts, **about, **call.launch
        )
        fix_up.fix_rows[call.persistent()](result, inputs, **call.fixing)
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
    parts = split_saved(kept, value, band, cut.width)
    units = _tile_units(parts, band)
    tensors = parts.flags, parts.mean, parts.log, parts.unit, gradient, by_log
    saved = product.Saved(*map(_tokens, tensors))
    with torch.cuda.device_of(value):
        inputs = call.inputs(parts.shifts)
        x, sums = _new_terms(call, band.tiles, band.far, by_token=False)
        terms.target_terms[call.programs(band.tiles)](
            by_query, x, _tokens(sums), saved, inputs, GATE=call.gate, **call.tile
        )
        operand = _operand(call, inputs, x, sums, units, transposed=True)
        product.backward[call.programs(band.source_tiles)](
            by_key,
            by_value,
            inputs,
            operand,
            call.where(transposed=True),
            FORM=band.form,
            BLOCKS=call.blocks,
            **call.launch,
        )
        fix_up.fix_sources[call.persistent()](by_key, by_value, saved, inputs, **call.fixing)
        if not biased:
            return [*results, None]
        by_table = _bias_gradient(call, inputs, x, units)
        pairs = band.reach * (len(value) if band.shared else band.tiles)
        fix_up.fix_bias[call.persistent()](
            band.place(by_table), saved, inputs, pairs=pairs, **call.fixing
        )
    if band.shared:
        by_table = _along_diagonals(by_table, band)
    return [*results, by_table.to(call.table.dtype)]


def _along_diagonals(by_tiles: Tensor, band: Band) -> Tensor:
    """The gradient of w [B, offsets] from that of the tile [B, tile, reach · tile] of each."""
    batch, tile, width = by_tiles.shape
    size, stride = (batch, 2 * band.radius + 1, tile), (tile * width, 1, width + 1)
    return by_tiles.as_strided(size, stride, band.before * tile - band.radius).sum(2)


def share_out(steps: int, pairs: int, device: torch.device) -> tuple[int, int]:
    """Programs per tile of w, and steps of each."""
    wanted = PROGRAMS_PER_PROCESSOR * count_processors(device)
    each = triton.cdiv(steps, triton.cdiv(wanted, pairs))
    return triton.cdiv(steps, each), each


def _bias_gradient(call: Call, inputs: Inputs, targets: Tokens, units: Tokens) -> Tensor:
    """The gradient of w but for what flagged tiles add, in the shape of the table.

    If that is shared, of its tile, [B, tile, reach · tile].
    """
    band, cut, device = call.band, call.cut, call.value.device
    sources, _ = _key_terms(call, inputs, units, summed=False, by_token=True)
    side = min(cut.tile, SIDE)
    owners, items, shape = band.tiles, len(call.value), call.table.shape
    if band.shared:
        owners, items = items, owners
        shape = owners, cut.tile, band.reach * cut.tile
    pairs = owners * band.reach * (cut.tile // side)
    steps = items * triton.cdiv(2 * call.value.shape[2], cut.step)
    parts, each = share_out(steps, pairs, device)
    # Zeros: what a table or a tile holds beyond the window, no program writes.
    by_table = torch.zeros(parts, *shape, dtype=torch.float32, device=device)
    product.bias_gradient[(pairs * parts,)](
        band.place(by_table[0]),
        by_table.stride(0),
        inputs,
        band.whole(inputs.where),
        (targets, sources),
        units,
        share=(each, steps),
        FORM=band.form,
        BLOCKS=call.blocks,
        SIDE=side,
        **call.launch,
    )
    return by_table.sum(0) if parts > 1 else by_table[0]
