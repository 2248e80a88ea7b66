from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..geometry import Window, as_pair, neighbours, split
from ..kernel_op import TOKENS, differentiated, register
from . import matmul, operands, recompute_flagged
from .block_sizes import MatmulBlock, cdiv, count_processors
from .online_softmax import Strided, new_wanted, strided
from .tiling import (
    SavedParts,
    TileBand,
    choose_block,
    find_extents,
    find_form,
    make_band,
    new_saved,
    split_saved,
)
from .weights import Extents, MatmulForm, MatmulInputs, MatmulSaved, product_weights_kernel

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


class MatmulCall(NamedTuple):
    query: Tensor | None
    key: Tensor
    value: Tensor
    table: Tensor
    key_mask: Tensor | None
    gate: str
    band: TileBand
    block: MatmulBlock
    pair_mask: Tensor | None = None

    @property
    def parts(self) -> int:
        return cdiv(self.value.shape[2], self.block.width)

    @property
    def form(self) -> MatmulForm:
        return find_form(self.band, self.block, GROUP)

    def extents(self, transposed: bool = False) -> Extents:
        return find_extents(self.band, len(self.value), self.value.shape[2], transposed)

    def inputs(self, saved: SavedParts) -> MatmulInputs:
        strides = (1, 0, 0) if self.band.shared else (self.band.own * self.band.targets, 0, 1)
        shifts = saved.shifts, *strides
        table, centre = self.band.locate(self.table, self.pair_mask), strided(saved.centre)
        tensors = strided(self.key), strided(self.value), table, shifts, centre
        return MatmulInputs(self.extents(), *tensors, strided(self.query), strided(self.key_mask))

    def programs(self, tiles: int) -> tuple[int]:
        return (tiles * len(self.value) * self.parts,)

    def launch_terms(self, kernel: Any, tiles: int, *arguments: Any, **options: Any) -> None:
        options.update(TILE=self.block.tile, WIDTH=self.block.width, num_warps=self.block.warps)
        kernel[self.programs(tiles)](*arguments, **options)

    def launch_product(
        self, kernel: Any, programs: tuple[int], *arguments: Any, **options: Any
    ) -> None:
        options.update(num_warps=self.block.warps, num_stages=self.block.stages)
        kernel[programs](*arguments, FORM=self.form, **options)

    def recompute(self, kernel: Any, *arguments: Any) -> None:
        programs = RECOMPUTE_PROGRAMS * count_processors(self.value.device)
        options = dict(FORM=self.form, GATE=self.gate, maxnreg=RECOMPUTE_REGISTERS)
        kernel[(programs,)](*arguments, num_warps=max(4, self.block.width // 16), **options)


def _units(saved: SavedParts, call: MatmulCall, inputs: MatmulInputs) -> Tensor:
    """Write the units of all tiles and the centre; return the first visible key [B, D]."""
    batch, _, channels = call.value.shape
    shape = batch, call.band.source_tiles, channels
    maxima, firsts = (call.key.new_empty(shape, dtype=x) for x in (torch.float32, torch.int32))
    arguments = strided(maxima), strided(firsts), inputs
    call.launch_terms(operands.product_maxima_kernel, call.band.source_tiles, *arguments)
    if call.band.causal:
        torch.cummax(maxima, 1, out=(saved.units, torch.empty_like(maxima, dtype=torch.int64)))
    else:
        torch.amax(maxima, 1, keepdim=True, out=saved.units)
    return firsts.amin(1)


def _tile_units(saved: SavedParts, band: TileBand) -> Strided:
    batch, tile, channel = saved.units.stride()
    return saved.units, batch, tile if band.causal else 0, channel


def _new_terms(
    call: MatmulCall, tiles: int, summed: bool, token_major: bool
) -> tuple[Strided, Tensor | None]:
    """Return new terms [B, tokens, N], token-major or channel-major, and sums over tiles."""
    batch, numbers = len(call.value), call.parts * 2 * call.block.width
    tokens = tiles * call.block.tile
    shape = (tokens, numbers) if token_major else (numbers, tokens)
    x = call.value.new_empty(batch, *shape, dtype=call.block.operand)
    sums = call.value.new_empty(batch, tiles, numbers, dtype=torch.float32) if summed else None
    return strided(x if token_major else x.transpose(1, 2)), sums


def _running(
    sums: Tensor | None, units: Strided, call: MatmulCall, reverse: bool
) -> Strided | None:
    if sums is None:
        return None
    batch, tiles, numbers = sums.shape
    totals = strided(torch.empty_like(sums))
    size = min(SUMS_AT_ONCE, 2 * call.block.width)
    sizes = tiles, call.value.shape[2], numbers // size
    options = dict(CAUSAL=call.band.causal, REVERSED=reverse, SIZE=size, num_warps=2)
    operands.product_running_sums_kernel[(batch * sizes[2],)](
        totals, strided(sums), units, sizes, **options
    )
    return totals


def _operand(
    call: MatmulCall,
    inputs: MatmulInputs,
    terms: tuple[Strided, Tensor | None],
    units: Strided,
    transposed: bool = False,
) -> matmul.MatmulOperand:
    (x, sums), band, tile = terms, call.band, call.block.tile
    if band.own:
        return matmul.MatmulOperand(None, x, units, None, None)
    rows, others = band.tiles, band.source_tiles
    if transposed:
        rows, others = others, rows
    width = tile * (others if band.window is None else band.reach)
    owners, rows = (len(call.value), 1) if band.shared else (1, rows)
    weights = call.value.new_empty(owners * rows * tile, width, dtype=call.block.operand)
    extents = band.full_extents(call.extents(transposed))
    options = dict(TRANSPOSED=transposed, ROWS=ROWS_WEIGHED, STEP=min(tile, 64))
    product_weights_kernel[(rows * tile // ROWS_WEIGHED, owners)](
        weights, inputs.shifts, inputs.bias, extents, width, FORM=call.form, **options
    )
    past = None if band.causal and transposed else _running(sums, units, call, reverse=False)
    future = _running(sums, units, call, reverse=True) if transposed or not band.causal else None
    each = (tile * width, 0) if band.shared else (0, tile * width)
    return matmul.MatmulOperand((weights, width, *each), x, units, past, future)


def launch_forward(call: MatmulCall, kept: Tensor) -> Tensor:
    """Return the output [B, T, D]; unless `kept` is empty, write what the gradient needs into it."""
    value, band = call.value, call.band
    output = value.new_empty(len(value), band.targets, value.shape[2])
    parts = split_saved(kept, value, band, call.block.width)
    flags, mean, log = strided(parts.flags), strided(parts.mean), strided(parts.log)
    saved, inputs = MatmulSaved(flags, mean, log, None, strided(output)), call.inputs(parts)
    firsts, units = _units(parts, call, inputs), _tile_units(parts, band)
    token_major = call.block.operand != torch.float32
    x, sums = _new_terms(call, band.source_tiles, band.has_outside, token_major)
    written = x, strided(sums)
    call.launch_terms(operands.product_key_terms_kernel, band.source_tiles, *written, inputs, units)
    arguments = saved, inputs, _operand(call, inputs, (x, sums), units), firsts
    programs = call.programs(band.tiles)
    call.launch_product(matmul.product_forward_kernel, programs, *arguments, GATE=call.gate)
    call.recompute(recompute_flagged.product_recompute_rows_kernel, saved, inputs)
    return output


def launch_backward(
    gradient: Tensor, kept: Tensor, call: MatmulCall, biased: bool
) -> list[Tensor | None]:
    band, value = call.band, call.value
    results = new_wanted((call.query, call.key, value), (call.query is not None, True, True))
    grad_query, *grads = map(strided, results)
    parts = split_saved(kept, value, band, call.block.width)
    flags, mean, log = strided(parts.flags), strided(parts.mean), strided(parts.log)
    unit = strided(gradient.new_empty(gradient.shape, dtype=torch.float32))
    saved = MatmulSaved(flags, mean, log, unit, None, strided(gradient))
    flagged, inputs = MatmulSaved(flags, unit=unit), call.inputs(parts)
    call.recompute(recompute_flagged.product_recompute_rows_kernel, flagged, inputs)
    units = _tile_units(parts, band)
    x, sums = _new_terms(call, band.tiles, band.has_outside, token_major=False)
    arguments = grad_query, x, strided(sums), saved, inputs
    call.launch_terms(operands.product_target_terms_kernel, band.tiles, *arguments, GATE=call.gate)
    operand = _operand(call, inputs, (x, sums), units, transposed=True)
    sources, _ = _new_terms(call, band.source_tiles, False, True) if biased else (None, None)
    written, extents = (*grads, sources), call.extents(transposed=True)
    programs = call.programs(band.source_tiles)
    call.launch_product(
        matmul.product_backward_kernel, programs, *written, inputs, operand, extents
    )
    call.recompute(recompute_flagged.product_recompute_sources_kernel, *grads, saved, inputs)
    if not biased:
        return [*results, None]
    grad_table = _bias_gradient(call, inputs, (x, sources), units)
    pairs = band.reach * (len(value) if band.shared else band.tiles)
    if band.own:
        pairs *= len(value)
    located = band.locate(grad_table)
    call.recompute(recompute_flagged.product_recompute_bias_kernel, located, saved, inputs, pairs)
    if band.shared:  # sum the shared tile [B, tile, reach · tile] to w [B, offsets]
        batch, tile, width = grad_table.shape
        size, stride = (batch, 2 * band.radius + 1, tile), (tile * width, 1, width + 1)
        grad_table = grad_table.as_strided(size, stride, band.before * tile - band.radius).sum(2)
    return [*results, grad_table.to(call.table.dtype)]


def share_out(steps: int, pairs: int, device: torch.device) -> tuple[int, int]:
    wanted = PROGRAMS_PER_PROCESSOR * count_processors(device)
    each = cdiv(steps, cdiv(wanted, pairs))
    return cdiv(steps, each), each


def _bias_gradient(
    call: MatmulCall, inputs: MatmulInputs, terms: tuple[Strided, Strided | None], units: Strided
) -> Tensor:
    band, block, device = call.band, call.block, call.value.device
    side = min(block.tile, SIDE)
    owners, items, shape = band.tiles, len(call.value), tuple(call.table.shape)
    if band.shared:
        owners, items = items, owners
        shape = owners, block.tile, band.reach * block.tile
    pairs = owners * band.reach * (block.tile // side)
    steps = items * cdiv(2 * call.value.shape[2], block.step)
    parts, each = share_out(steps, pairs, device)
    if band.own:
        pairs, parts, each = pairs * items, 1, steps
    # No program writes the entries outside the window.
    grad_table = torch.zeros(parts, *shape, dtype=torch.float32, device=device)
    arguments = inputs, band.full_extents(inputs.extents), terms, units, (each, steps)
    results = band.locate(grad_table[0]), grad_table.stride(0)
    call.launch_product(
        matmul.product_bias_backward_kernel, (pairs * parts,), *results, *arguments, SIDE=side
    )
    return grad_table.sum(0) if parts > 1 else grad_table[0]


def aft_full_batched(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    num_heads: int | None,
    pair_mask: Tensor | None,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute AFT-full with a w per sample or head, whose W is never in memory."""
    heads, batch = num_heads or 1, len(value)
    bias = position_bias if num_heads else position_bias.unsqueeze(-3)
    shared = bias.dim() == 3 and pair_mask is None and key_mask is None
    order, joined = ((2, 1, 0, 3), 2) if shared else ((0, 2, 1, 3), 0)

    def as_sequences(x: Tensor) -> Tensor:
        return x.unflatten(2, (heads, -1)).permute(order).flatten(joined, joined + 1)

    if heads > 1:
        query = None if query is None else as_sequences(query)
        key, value = as_sequences(key), as_sequences(value)
        key_mask = None if key_mask is None else key_mask.repeat_interleave(heads, 0)
    bias = bias.expand(1 if shared and heads > 1 else batch, *bias.shape[-3:])
    save = differentiated(query, key, value, bias)
    inputs = query, key, value, bias, key_mask, pair_mask
    output = product(*inputs, None, None, causal, gate, save)[0]
    if heads == 1:
        return output
    sizes = (batch, -1) if shared else (batch, heads)
    return output.unflatten(joined, sizes).permute(order).flatten(2)


def aft_full(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute AFT-full in O(T·S·D): tiles of exp(w) times e^k v and e^k, for every finite key."""
    save = differentiated(query, key, value, position_bias)
    tensors = query, key, value, position_bias, key_mask, None
    return product(*tensors, None, None, causal, gate, save)[0]


def aft_local(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None,
    *,
    window: Window,
    grid: Sequence[int] | None,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute AFT-local in O(T·s·D): products near the window, and sums of the tiles outside."""
    save = differentiated(query, key, value, pos_u, pos_v)
    window, grid = window_on(window, grid)
    table = local_table(pos_u, pos_v, value, window, grid, causal, save)
    return product(query, key, value, table, key_mask, None, window, grid, causal, gate, save)[0]


def window_on(window: Window, grid: Sequence[int] | None) -> tuple[list[int], list[int] | None]:
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
    band = make_band(pos_u, value, window, grid, causal, choose_block(value, save).tile)
    around = neighbours(pos_v.float(), band.tile, band.before, band.after)
    return torch.bmm(split(pos_u.float(), band.tile), around.transpose(1, 2))


def _matmul_call(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    table: Tensor,
    key_mask: Tensor | None,
    pair_mask: Tensor | None,
    window: Sequence[int] | None,
    grid: Sequence[int] | None,
    causal: bool,
    gate: str,
    save: bool,
) -> MatmulCall:
    block = choose_block(value, save, table.dim() == 4)
    band = make_band(table, value, window, grid, causal, block.tile)
    return MatmulCall(query, key, value, table, key_mask, gate, band, block, pair_mask)


def product(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Return AFT-full, or AFT-local with a window, and with `save` what backward needs."""
    call = _matmul_call(*inputs)
    kept = new_saved(call.value, call.band, call.block.width, inputs[-1])
    return launch_forward(call, kept), kept


def product_backward(gradient: Tensor, saved: Tensor, *inputs: Any) -> list[Tensor | None]:
    given: tuple[Any, ...] = (*inputs[:-1], True)
    return launch_backward(gradient, saved, _matmul_call(*given), inputs[-1][3])


def _empty(*inputs: Any) -> tuple[Tensor, Tensor]:
    call = _matmul_call(*inputs)
    output = call.value.new_empty(len(call.value), call.band.targets, call.value.shape[2])
    return output, new_saved(call.value, call.band, call.block.width, inputs[-1])


product = register(
    product,
    f'{TOKENS}, Tensor table, Tensor? key_mask, Tensor? pair_mask, SymInt[]? window, '
    'SymInt[]? grid, bool causal, str gate',
    product_backward,
    fake=_empty,
    public_name='aft_full and aft_local',
)
