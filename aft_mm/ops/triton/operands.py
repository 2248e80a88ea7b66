"""Operands of the products: terms of the sources and of the targets, written once per call.

``E = e^{k − unit}`` has a unit per tile and channel: the largest key of the sequence, or for causal
ops of the tile and all tiles before it, all of which are visible to later tiles. The two terms of a
channel are adjacent: (E (v − m), E) of a source; (a, c) of a target, for the gradient
(`matmul.py`).

The centre m of a sequence and channel is the mean of its first tile of values. Without it
gradients, which are sums of W E (v − o), would be wrong for values far from 0, as tensor cores cut
operands to 11 bits or fewer.

terms [B, tokens, N] have N = 2 · channels numbers, padded with 0 to whole tiles and blocks. Sums
over tiles [B, tiles, N] in float32 replace the tokens outside the window.
"""

import triton
import triton.language as tl

from .online_softmax import LOWEST, gate_slope, gate_value
from .weights import load_shifts, load_vector, span, terms_at, tokens_at

# λ of a row that sees nothing: its weights e^−λ are 0.
UNSEEN = tl.constexpr(1e30)
# Tiles that `running_sums` loads at once.
AT_ONCE = tl.constexpr(8)


@triton.jit
def locate_program(extents, TILE: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr):
    """Return tile, sequence, block of channels, tokens [TILE] and channels [WIDTH] of this program.

    Programs that share a part of W are adjacent.
    """
    parts = tl.cdiv(extents.channels, WIDTH)
    part = tl.program_id(0) % parts
    index = tl.program_id(0) // parts
    if SHARED:
        tiles = tl.num_programs(0) // (parts * extents.batches)
        tile, batch = index % tiles, index // tiles
    else:
        tile, batch = index // extents.batches, index % extents.batches
    rows = tile * TILE + tl.arange(0, TILE)
    columns = part * WIDTH + tl.arange(0, WIDTH)
    return tile, batch.to(tl.int64), part, rows, columns


@triton.jit
def load_keys(inputs, batch, rows, columns):
    """Load keys in float32, and which of them are visible."""
    real = (rows < inputs.extents.sources)[:, None] & (columns < inputs.extents.channels)[None, :]
    keys = tl.load(tokens_at(inputs.key, batch, rows, columns), mask=real, other=0.0)
    keys = keys.to(tl.float32)
    seen = real & (keys != float('-inf'))
    if inputs.key_mask is not None:
        mask = inputs.key_mask
        at = mask[0] + batch * mask[1] + rows.to(tl.int64) * mask[2]
        seen &= (tl.load(at, mask=rows < inputs.extents.sources, other=0) != 0)[:, None]
    return keys, seen


@triton.jit
def load_source(inputs, units, batch, tile, rows, columns):
    """Return E and v − m of these tokens; E is 0 where the key is hidden."""
    keys, seen = load_keys(inputs, batch, rows, columns)
    values = tl.load(tokens_at(inputs.value, batch, rows, columns), mask=seen, other=0.0)
    inside = columns < inputs.extents.channels
    unit = load_vector(units, batch, tile, columns, inside, 0.0)
    values = values.to(tl.float32) - load_vector(inputs.centre, batch, 0, columns, inside, 0.0)
    return tl.where(seen, tl.exp(keys - unit[None, :]), 0.0), values


@triton.jit
def store_terms(terms, sums, pair, weight, tile, batch, part, NUMBERS: tl.constexpr):
    """Store a tile of terms and, unless `sums` is None, their sum over its tokens times `weight`."""
    numbers = part * NUMBERS + tl.arange(0, NUMBERS)
    at = terms_at(terms, batch, tile * weight.shape[0], part * NUMBERS, weight.shape[0], NUMBERS)
    tl.store(at, pair.to(terms.at.dtype.element_ty))
    if sums is not None:
        at = sums.at + batch * sums.batch + tile.to(tl.int64) * sums.token + numbers
        tl.store(at, tl.sum(pair * weight[:, None], 0))


@triton.jit
def key_maxima(maxima, firsts, inputs, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Compute the centre, and the largest (LOWEST if none) and first visible key of tiles."""
    extents = inputs.extents
    tile, batch, _, rows, columns = locate_program(extents, TILE, WIDTH, False)
    keys, seen = load_keys(inputs, batch, rows, columns)
    at = batch * maxima.batch + tile.to(tl.int64) * maxima.token + columns
    inside = columns < extents.channels
    tl.store(maxima.at + at, tl.max(tl.where(seen, keys, LOWEST), 0), mask=inside)
    first = tl.min(tl.where(seen, rows[:, None], extents.sources), 0)
    tl.store(firsts + at, first, mask=inside)
    if tile == 0:
        values = tl.load(tokens_at(inputs.value, batch, rows, columns), mask=seen, other=0.0)
        number = tl.sum(seen.to(tl.float32), 0)
        centre = tl.sum(values.to(tl.float32), 0) / tl.maximum(number, 1.0)
        centre = tl.where(tl.abs(centre) < float('inf'), centre, 0.0)
        tl.store(inputs.centre.at + batch * inputs.centre.batch + columns, centre, mask=inside)


@triton.jit
def key_terms(terms, sums, inputs, units, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Compute (E (v − m), E) and, unless `sums` is None, their sums over each tile."""
    tile, batch, part, rows, columns = locate_program(inputs.extents, TILE, WIDTH, False)
    weight, values = load_source(inputs, units, batch, tile, rows, columns)
    pair = tl.interleave(weight * values, weight)
    store_terms(terms, sums, pair, tl.full([TILE], 1.0, tl.float32), tile, batch, part, 2 * WIDTH)


@triton.jit
def load_gradient(saved, inputs, batch, rows, columns, real, GATE: tl.constexpr):
    """Return dy g(q) of these tokens, and the gradient of λ."""
    at = tokens_at(saved.gradient, batch, rows, columns)
    grad_mean = tl.load(at, mask=real, other=0.0).to(tl.float32)
    if GATE != 'none':
        queries = tl.load(tokens_at(inputs.query, batch, rows, columns), mask=real, other=0.0)
        grad_mean *= gate_value(queries, GATE)
    grad_log = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    if saved.grad_log is not None:
        grad_log = tl.load(tokens_at(saved.grad_log, batch, rows, columns), mask=real, other=0.0)
    return grad_mean, grad_log


@triton.jit
def target_terms(
    grad_query,
    terms,
    sums,
    saved,
    inputs,
    GATE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute the gradient of query, and a and c, which are 0 in flagged tiles, with their sums.

    The sums are for sources outside the window, which have ``W = e^−shift``.
    """
    extents = inputs.extents
    tile, batch, part, rows, columns = locate_program(extents, TILE, WIDTH, False)
    real = (rows < extents.targets)[:, None] & (columns < extents.channels)[None, :]
    mean = tl.load(tokens_at(saved.mean, batch, rows, columns), mask=real, other=0.0)
    log = tl.load(tokens_at(saved.log, batch, rows, columns), mask=real, other=UNSEEN)
    grad_mean, grad_log = load_gradient(saved, inputs, batch, rows, columns, real, GATE)
    if grad_query is not None:
        grad = tl.load(tokens_at(saved.gradient, batch, rows, columns), mask=real, other=0.0)
        queries = tl.load(tokens_at(inputs.query, batch, rows, columns), mask=real, other=0.0)
        grad = grad.to(tl.float32) * mean * gate_slope(queries, GATE)
        at = tokens_at(grad_query, batch, rows, columns)
        tl.store(at, grad.to(grad_query.at.dtype.element_ty), mask=real)
    flagged = load_vector(saved.flags, batch, tile, part, True, 0) != 0
    scale = tl.where(flagged, 0.0, tl.exp(-log))
    # Not 0 · NaN, which would make the whole product NaN.
    grad_term = tl.where(scale == 0, 0.0, scale * grad_mean)
    inside = columns < extents.channels
    mean -= load_vector(inputs.centre, batch, 0, columns, inside, 0.0)
    grad_weight = tl.where(scale == 0, 0.0, scale * (grad_log - grad_mean * mean))
    weight = tl.full([TILE], 1.0, tl.float32)
    if sums is not None:
        weight = tl.exp(-load_shifts(inputs.shifts, batch, rows, rows < extents.targets))
    pair = tl.interleave(grad_term, grad_weight)
    store_terms(terms, sums, pair, weight, tile, batch, part, 2 * WIDTH)


@triton.jit
def load_unit(units, batch, tile, numbers, channels):
    return load_vector(units, batch, tile, numbers // 2, numbers < 2 * channels, 0.0)


@triton.jit
def running_sums(
    totals,
    sums,
    units,
    tiles,
    channels,
    blocks,
    CAUSAL: tl.constexpr,
    REVERSED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Compute sums over all tiles up to each tile, or REVERSED from it on, in its unit."""
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    numbers = tl.program_id(0) % blocks * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    before = tl.zeros([SIZE], tl.float32)
    at = batch * sums.batch + numbers
    for start in span(0, tiles, AT_ONCE):
        parts, own = (), ()
        for i in tl.static_range(AT_ONCE):
            tile = tl.cast(tiles - 1 - start - i if REVERSED else start + i, tl.int64)
            real = (tile >= 0) & (tile < tiles)
            parts = parts + (tl.load(sums.at + at + tile * sums.token, mask=real, other=0.0),)
            if CAUSAL:
                inside = real & (numbers < 2 * channels)
                own = own + (load_vector(units, batch, tile, numbers // 2, inside, 0.0),)
        for i in tl.static_range(AT_ONCE):
            tile = tl.cast(tiles - 1 - start - i if REVERSED else start + i, tl.int64)
            if CAUSAL:
                # Units never decrease, so the factor is at most 1.
                step = own[i] - before if REVERSED else before - own[i]
                total *= tl.exp(tl.where(start + i == 0, 0.0, step))
                before = own[i]
            total += parts[i]
            tl.store(totals + at + tile * sums.token, total, mask=(tile >= 0) & (tile < tiles))
