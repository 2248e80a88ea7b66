"""AFT-full and AFT-local: the launches of their products, and the torch operator."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..eager.banded_matmul import neighbours, split
from ..geometry import as_pair
from . import matmul, operands, recompute_flagged
from .block_sizes import MatmulBlock, cdiv, count_processors
from .online_softmax import new_like, strided
from .tiling import (
    SavedParts,
    TileBand,
    choose_block,
    make_band,
    new_saved,
    saved_shapes,
    split_saved,
)
from .torch_ops import differentiated, register
from .weights import Extents, MatmulInputs, Shifts, Tokens, weigh

ROWS_WEIGHED = 16
SUMS_AT_ONCE = 64
# Targets and sources of `recompute_flagged.py` at once. They take up to 216 registers; without a
# limit ptxas spills a few to fit more than two programs.
GROUP = 4
RECOMPUTE_REGISTERS = 224
RECOMPUTE_PROGRAMS = 2  # per multiprocessor
# Sources per program of the gradient of w; 128 would spill.
SIDE = 64
# With fewer programs, the sum over channels in the gradient of w is divided.
PROGRAMS_PER_PROCESSOR = 2


def _tokens(x: Tensor | None) -> Tokens | None:
    return None if x is None else Tokens(x, *x.stride())


class MatmulCall(NamedTuple):
    """The inputs of a product and its tiles."""

    query: Tensor | None
    key: Tensor
    value: Tensor
    table: Tensor
    key_mask: Tensor | None
    gate: str
    band: TileBand
    block: MatmulBlock

    def extents(self, transposed: bool = False) -> Extents:
        return self.band.extents(len(self.value), self.value.shape[2], transposed)

    def inputs(self, saved: SavedParts) -> MatmulInputs:
        return MatmulInputs(
            self.extents(),
            _tokens(self.key),
            _tokens(self.value),
            self.band.locate(self.table),
            Shifts(saved.shifts, *((1, 0) if self.band.shared else (0, 1))),
            _tokens(saved.centre),
            _tokens(self.query),
            strided(self.key_mask),
        )

    @property
    def parts(self) -> int:
        return cdiv(self.value.shape[2], self.block.width)

    @property
    def form(self) -> matmul.MatmulForm:
        """Constants for which `matmul.py` and `recompute_flagged.py` specialise their kernels."""
        block = self.block
        return matmul.MatmulForm(*self.band.form, block.width, block.step, block.precision, GROUP)

    @property
    def launch(self) -> dict[str, Any]:
        return dict(FORM=self.form, num_warps=self.block.warps, num_stages=self.block.stages)

    @property
    def tile(self) -> dict[str, int]:
        return dict(TILE=self.block.tile, WIDTH=self.block.width, num_warps=self.block.warps)

    @property
    def recompute_options(self) -> dict[str, Any]:
        return dict(FORM=self.form, GATE=self.gate, maxnreg=RECOMPUTE_REGISTERS)

    def programs(self, tiles: int) -> tuple[int]:
        """Return the grid: a program per tile, block of channels and sequence."""
        return (tiles * len(self.value) * self.parts,)

    def persistent(self) -> tuple[int]:
        """Return a grid of as many programs as run at the same time."""
        return (RECOMPUTE_PROGRAMS * count_processors(self.value.device),)


def _units(saved: SavedParts, call: MatmulCall, inputs: MatmulInputs) -> Tensor:
    """Write the units of all tiles and the centre; return the first visible key [B, D]."""
    batch, _, channels = call.value.shape
    shape = batch, call.band.source_tiles, channels
    maxima = call.key.new_empty(shape, dtype=torch.float32)
    firsts = call.key.new_empty(shape, dtype=torch.int32)
    programs = call.programs(call.band.source_tiles)
    operands.key_maxima[programs](_tokens(maxima), firsts, inputs, **call.tile)
    if call.band.causal:
        torch.cummax(maxima, 1, out=(saved.units, torch.empty_like(maxima, dtype=torch.int64)))
    else:
        torch.amax(maxima, 1, keepdim=True, out=saved.units)
    return firsts.amin(1)


def _tile_units(saved: SavedParts, band: TileBand) -> Tokens:
    """Return the unit of each tile, which is that of the sequence unless the op is causal."""
    batch, tile, channel = saved.units.stride()
    return Tokens(saved.units, batch, tile if band.causal else 0, channel)


def _new_terms(
    call: MatmulCall, tiles: int, summed: bool, token_major: bool
) -> tuple[Tokens, Tensor | None]:
    """Return new terms [B, tokens, N], token-major or channel-major, and sums over tiles.

    tf32 operands load fastest if the dimension that is summed over is contiguous.
    """
    batch, numbers = len(call.value), call.parts * 2 * call.block.width
    shape = (
        (tiles * call.block.tile, numbers) if token_major else (numbers, tiles * call.block.tile)
    )
    x = call.value.new_empty(batch, *shape, dtype=call.block.operand)
    sums = call.value.new_empty(batch, tiles, numbers, dtype=torch.float32) if summed else None
    return _tokens(x if token_major else x.transpose(1, 2)), sums


def _key_terms(
    call: MatmulCall, inputs: MatmulInputs, units: Tokens, summed: bool, token_major: bool
) -> tuple[Tokens, Tensor | None]:
    tiles = call.band.source_tiles
    x, sums = _new_terms(call, tiles, summed, token_major)
    operands.key_terms[call.programs(tiles)](x, _tokens(sums), inputs, units, **call.tile)
    return x, sums


def _running(sums: Tensor | None, units: Tokens, call: MatmulCall, reverse: bool) -> Tokens | None:
    """Return the sums over all tiles up to each tile, or from each tile on."""
    if sums is None:
        return None
    batch, tiles, numbers = sums.shape
    totals = torch.empty_like(sums)
    size = min(SUMS_AT_ONCE, 2 * call.block.width)
    operands.running_sums[(batch * (numbers // size),)](
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
    call: MatmulCall,
    inputs: MatmulInputs,
    x: Tokens,
    sums: Tensor | None,
    units: Tokens,
    transposed: bool = False,
) -> matmul.MatmulOperand:
    """Compute W, or Wᵀ, and the sums of the tiles outside it."""
    band, tile = call.band, call.block.tile
    rows, others = band.tiles, band.source_tiles
    if transposed:
        rows, others = others, rows
    width = tile * (others if band.window is None else band.reach)
    owners, rows = (len(call.value), 1) if band.shared else (1, rows)
    weights = call.value.new_empty(owners * rows * tile, width, dtype=call.block.operand)
    weigh[(rows * tile // ROWS_WEIGHED, owners)](
        weights,
        inputs.shifts,
        inputs.bias,
        band.full_extents(call.extents(transposed)),
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
    return matmul.MatmulOperand((weights, width, *each), x, units, past, future)


def launch_forward(call: MatmulCall, kept: Tensor) -> Tensor:
    """Return the output [B, T, D]; unless `kept` is empty, write what the gradient needs into it."""
    value, band, width = call.value, call.band, call.block.width
    batch, _, channels = value.shape
    shape = batch, band.targets, channels
    output = torch.empty(shape, dtype=value.dtype, device=value.device)
    if batch == 0:
        return output
    if kept.numel():
        saved = split_saved(kept, value, band, width)
    else:
        shapes = saved_shapes(value, band, width)[3:]
        parts = (value.new_empty(shape, dtype=torch.float32) for shape in shapes)
        saved = SavedParts(None, None, None, *parts)
    with torch.cuda.device_of(value):
        inputs = call.inputs(saved)
        firsts = _units(saved, call, inputs)
        units = _tile_units(saved, band)
        token_major = call.block.operand != torch.float32
        x, sums = _key_terms(call, inputs, units, band.has_outside, token_major)
        operand = _operand(call, inputs, x, sums, units)
        tensors = output, saved.flags, saved.mean, saved.log, saved.unit
        result = matmul.ForwardResult(*map(_tokens, tensors))
        matmul.mean_forward[call.programs(band.tiles)](
            result, inputs, operand, firsts, GATE=call.gate, **call.launch
        )
        recompute_flagged.recompute_rows[call.persistent()](
            result, inputs, **call.recompute_options
        )
    return output


def launch_backward(
    gradient: Tensor | None, grad_log: Tensor | None, kept: Tensor, call: MatmulCall, biased: bool
) -> list[Tensor | None]:
    """Return the gradients of query, key, value and, if `biased`, of the table.

    `gradient` is that of the output, `grad_log` that of λ; one of them may be None.
    """
    band, block, value = call.band, call.block, call.value
    results = [None if x is None else new_like(x) for x in (call.query, call.key, value)]
    grad_query, grad_key, grad_value = map(_tokens, results)
    if not len(value):
        return [*results, torch.zeros_like(call.table)]
    parts = split_saved(kept, value, band, block.width)
    units = _tile_units(parts, band)
    tensors = parts.flags, parts.mean, parts.log, parts.unit, gradient, grad_log
    saved = matmul.BackwardInputs(*map(_tokens, tensors))
    with torch.cuda.device_of(value):
        inputs = call.inputs(parts)
        x, sums = _new_terms(call, band.tiles, band.has_outside, token_major=False)
        operands.target_terms[call.programs(band.tiles)](
            grad_query, x, _tokens(sums), saved, inputs, GATE=call.gate, **call.tile
        )
        operand = _operand(call, inputs, x, sums, units, transposed=True)
        matmul.mean_backward[call.programs(band.source_tiles)](
            grad_key, grad_value, inputs, operand, call.extents(transposed=True), **call.launch
        )
        recompute_flagged.recompute_sources[call.persistent()](
            grad_key, grad_value, saved, inputs, **call.recompute_options
        )
        if not biased:
            return [*results, None]
        grad_table = _bias_gradient(call, inputs, x, units)
        pairs = band.reach * (len(value) if band.shared else band.tiles)
        recompute_flagged.recompute_bias[call.persistent()](
            band.locate(grad_table), saved, inputs, pairs=pairs, **call.recompute_options
        )
    if band.shared:
        grad_table = _along_diagonals(grad_table, band)
    return [*results, grad_table.to(call.table.dtype)]


def _along_diagonals(grad_tiles: Tensor, band: TileBand) -> Tensor:
    """Sum the gradient of the shared tile [B, tile, reach · tile] to that of w [B, offsets]."""
    batch, tile, width = grad_tiles.shape
    size, stride = (batch, 2 * band.radius + 1, tile), (tile * width, 1, width + 1)
    return grad_tiles.as_strided(size, stride, band.before * tile - band.radius).sum(2)


def share_out(steps: int, pairs: int, device: torch.device) -> tuple[int, int]:
    """Return the number of programs per tile of w, and the steps of each."""
    wanted = PROGRAMS_PER_PROCESSOR * count_processors(device)
    each = cdiv(steps, cdiv(wanted, pairs))
    return cdiv(steps, each), each


def _bias_gradient(
    call: MatmulCall, inputs: MatmulInputs, targets: Tokens, units: Tokens
) -> Tensor:
    """Return the gradient of w, or if shared of its tile, without the part of flagged tiles."""
    band, block, device = call.band, call.block, call.value.device
    sources, _ = _key_terms(call, inputs, units, summed=False, token_major=True)
    side = min(block.tile, SIDE)
    owners, items, shape = band.tiles, len(call.value), call.table.shape
    if band.shared:
        owners, items = items, owners
        shape = owners, block.tile, band.reach * block.tile
    pairs = owners * band.reach * (block.tile // side)
    steps = items * cdiv(2 * call.value.shape[2], block.step)
    parts, each = share_out(steps, pairs, device)
    # No program writes the entries outside the window.
    grad_table = torch.zeros(parts, *shape, dtype=torch.float32, device=device)
    matmul.bias_gradient[(pairs * parts,)](
        band.locate(grad_table[0]),
        grad_table.stride(0),
        inputs,
        band.full_extents(inputs.extents),
        (targets, sources),
        units,
        share=(each, steps),
        SIDE=side,
        **call.launch,
    )
    return grad_table.sum(0) if parts > 1 else grad_table[0]


def aft_full(query, key, value, position_bias, *, causal, key_mask, gate) -> Tensor:
    """Compute AFT-full in O(T·S·D): tiles of exp(w) times e^k v and e^k, for every finite key."""
    save = differentiated(query, key, value, position_bias)
    tensors = query, key, value, position_bias, key_mask
    return product(*tensors, None, None, causal, gate, save)[0]


def aft_local(query, key, value, pos_u, pos_v, *, window, grid, causal, key_mask, gate) -> Tensor:
    """Compute AFT-local in O(T·s·D): products near the window, and sums of the tiles outside."""
    save = differentiated(query, key, value, pos_u, pos_v)
    window, grid = window_on(window, grid)
    table = local_table(pos_u, pos_v, value, window, grid, causal, save)
    return product(query, key, value, table, key_mask, window, grid, causal, gate, save)[0]


def window_on(window, grid) -> tuple[list[int], list[int] | None]:
    """Return the window as a list of one size, or two on a 2-d grid, and the 2-d grid or None."""
    if grid is None or len(grid) == 1:
        return [window if isinstance(window, int) else window[0]], None
    return list(as_pair(window)), list(grid)


def local_table(
    pos_u: Tensor,
    pos_v: Tensor | None,
    value: Tensor,
    window: Sequence[int],
    grid: Sequence[int] | None,
    causal: bool,
    save: bool,
) -> Tensor:
    """Return the free bias, or the products u · v of each tile with the tiles that it meets."""
    if pos_v is None:
        return pos_u
    tile = choose_block(value, save).tile
    band = make_band(pos_u, value, window, grid, causal, tile)
    return _FactorTable.apply(pos_u.float(), pos_v.float(), band)


class _FactorTable(torch.autograd.Function):
    """u · v of neighbouring tiles; autograd's backward would multiply in bfloat16 under autocast."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor, band: TileBand) -> Tensor:
        ctx.save_for_backward(u, v)
        ctx.band = band
        around = neighbours(v, band.tile, band.before, band.after)
        return torch.bmm(split(u, band.tile), around.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        u, v = ctx.saved_tensors
        band = ctx.band
        with torch.autocast(gradient.device.type, enabled=False):
            around = neighbours(v, band.tile, band.before, band.after)
            grad_u = torch.bmm(gradient, around).flatten(0, 1)[: len(u)]
            parts = torch.bmm(gradient.transpose(1, 2), split(u, band.tile))
        parts = parts.unflatten(1, (band.reach, band.tile))
        grad_v = parts.new_zeros(band.tiles + band.reach - 1, *parts.shape[2:])
        for slot in range(band.reach):
            grad_v[slot : slot + band.tiles] += parts[:, slot]
        return grad_u, grad_v[band.before :].flatten(0, 1)[: len(v)], None


def _call(query, key, value, table, key_mask, window, grid, causal, gate, save: bool) -> MatmulCall:
    block = choose_block(value, save)
    band = make_band(table, value, window, grid, causal, block.tile)
    return MatmulCall(query, key, value, table, key_mask, gate, band, block)


def product(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    key_mask: Tensor | None,
    window: Sequence[int] | None,
    grid: Sequence[int] | None,
    causal: bool,
    gate: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return AFT-full, or AFT-local with a window, and with `save` what backward needs."""
    call = _call(query, key, value, table, key_mask, window, grid, causal, gate, save)
    kept = new_saved(value, call.band, call.block.width, save)
    return launch_forward(call, kept), kept


def product_backward(
    gradient, saved, query, key, value, table, key_mask, window, grid, causal, gate, wanted
) -> list[Tensor | None]:
    call = _call(query, key, value, table, key_mask, window, grid, causal, gate, True)
    return launch_backward(gradient, None, saved, call, wanted[3])


def _empty(query, key, value, *others):
    call = _call(query, key, value, *others)
    output = value.new_empty(value.shape[0], call.band.targets, value.shape[2])
    return output, new_saved(value, call.band, call.block.width, others[-1])


product = register(product, product_backward, fake=_empty, public_name='aft_full and aft_local')
