"""What goes into the products: terms of the sources and of the targets, written once per call.

``E = e^{k − unit}`` with a unit per tile and channel: the largest key of the sequence, or if causal
of the tile and all before it, which every row of a later tile sees. Both terms of a channel stand
side by side: (E v, E) of a source; (a, c) of a target, which the gradient needs (`product.py`).

terms [B, tokens, N] have N = 2 · channels numbers, in whole tiles and blocks of channels, which are
filled with 0. Sums over tiles [B, tiles, N] in float32 stand for tokens beyond the window.
"""

import triton
import triton.language as tl

from .bias import load_row, load_shifts, span, terms_at, tokens_at
from .rows import LOWEST, gate_slope, gate_value

# λ of a row that sees nothing, whose weights e^−λ are 0.
UNSEEN = tl.constexpr(1e30)
# Tiles that `running_sums` loads at once.
AT_ONCE = tl.constexpr(8)


@triton.jit
def place(where, TILE: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr):
    """Tile, sequence, block of channels, tokens [TILE] and channels [WIDTH] of this program.

    What shares a part of W runs side by side: sequences and channels, or SHARED tiles and channels.
    """
    parts = tl.cdiv(where.channels, WIDTH)
    part = tl.program_id(0) % parts
    index = tl.program_id(0) // parts
    if SHARED:
        tiles = tl.num_programs(0) // (parts * where.batches)
        tile, batch = index % tiles, index // tiles
    else:
        tile, batch = index // where.batches, index % where.batches
    rows = tile * TILE + tl.arange(0, TILE)
    columns = part * WIDTH + tl.arange(0, WIDTH)
    return tile, batch.to(tl.int64), part, rows, columns


@triton.jit
def load_keys(inputs, batch, rows, columns):
    """Keys in float32, and which of them are seen."""
    real = (rows < inputs.where.sources)[:, None] & (columns < inputs.where.channels)[None, :]
    keys = tl.load(tokens_at(inputs.key, batch, rows, columns), mask=real, other=0.0)
    keys = keys.to(tl.float32)
    seen = real & (keys != float('-inf'))
    if inputs.key_mask is not None:
        mask = inputs.key_mask
        at = mask[0] + batch * mask[1] + rows.to(tl.int64) * mask[2]
        seen &= (tl.load(at, mask=rows < inputs.where.sources, other=0) != 0)[:, None]
    return keys, seen


@triton.jit
def load_source(inputs, units, batch, tile, rows, columns):
    """E and v of these tokens, both 0 where the key is hidden."""
    keys, seen = load_keys(inputs, batch, rows, columns)
    values = tl.load(tokens_at(inputs.value, batch, rows, columns), mask=seen, other=0.0)
    unit = load_row(units, batch, tile, columns, columns < inputs.where.channels, 0.0)
    return tl.where(seen, tl.exp(keys - unit[None, :]), 0.0), values.to(tl.float32)


@triton.jit
def store_terms(terms, sums, pair, weight, tile, batch, part, NUMBERS: tl.constexpr):
    """A tile of terms, and their sum over its tokens with `weight` if these are wanted."""
    numbers = part * NUMBERS + tl.arange(0, NUMBERS)
    at = terms_at(terms, batch, tile * weight.shape[0], part * NUMBERS, weight.shape[0], NUMBERS)
    tl.store(at, pair.to(terms.at.dtype.element_ty))
    if sums is not None:
        at = sums.at + batch * sums.batch + tile.to(tl.int64) * sums.token + numbers
        tl.store(at, tl.sum(pair * weight[:, None], 0))


@triton.jit
def key_maxima(maxima, firsts, inputs, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """The largest visible key of each tile, LOWEST if there is none, and where the first one is."""
    where = inputs.where
    tile, batch, _, rows, columns = place(where, TILE, WIDTH, False)
    keys, seen = load_keys(inputs, batch, rows, columns)
    at = batch * maxima.batch + tile.to(tl.int64) * maxima.token + columns
    inside = columns < where.channels
    tl.store(maxima.at + at, tl.max(tl.where(seen, keys, LOWEST), 0), mask=inside)
    first = tl.min(tl.where(seen, rows[:, None], where.sources), 0)
    tl.store(firsts + at, first, mask=inside)


@triton.jit
def key_terms(terms, sums, inputs, units, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """(E v, E), and their sums over each tile unless `sums` is None."""
    tile, batch, part, rows, columns = place(inputs.where, TILE, WIDTH, False)
    weight, values = load_source(inputs, units, batch, tile, rows, columns)
    pair = tl.interleave(weight * values, weight)
    store_terms(terms, sums, pair, tl.full([TILE], 1.0, tl.float32), tile, batch, part, 2 * WIDTH)


@triton.jit
def load_gradient(saved, inputs, batch, rows, columns, real, GATE: tl.constexpr):
    """dy g(q) of these tokens, and the gradient of λ."""
    at = tokens_at(saved.gradient, batch, rows, columns)
    by_mean = tl.load(at, mask=real, other=0.0).to(tl.float32)
    if GATE != 'none':
        queries = tl.load(tokens_at(inputs.query, batch, rows, columns), mask=real, other=0.0)
        by_mean *= gate_value(queries, GATE)
    by_log = tl.zeros([rows.shape[0], columns.shape[0]], tl.float32)
    if saved.by_log is not None:
        by_log = tl.load(tokens_at(saved.by_log, batch, rows, columns), mask=real, other=0.0)
    return by_mean, by_log


@triton.jit
def target_terms(
    by_query,
    terms,
    sums,
    saved,
    inputs,
    GATE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The gradient of query; a and c, which are 0 in flagged tiles, and their sums.

    A sum stands for the tokens that see the sources beyond the window with ``W = e^−shift``.
    """
    where = inputs.where
    tile, batch, part, rows, columns = place(where, TILE, WIDTH, False)
    real = (rows < where.targets)[:, None] & (columns < where.channels)[None, :]
    mean = tl.load(tokens_at(saved.mean, batch, rows, columns), mask=real, other=0.0)
    log = tl.load(tokens_at(saved.log, batch, rows, columns), mask=real, other=UNSEEN)
    by_mean, by_log = load_gradient(saved, inputs, batch, rows, columns, real, GATE)
    if by_query is not None:
        grad = tl.load(tokens_at(saved.gradient, batch, rows, columns), mask=real, other=0.0)
        queries = tl.load(tokens_at(inputs.query, batch, rows, columns), mask=real, other=0.0)
        grad = grad.to(tl.float32) * mean * gate_slope(queries, GATE)
        at = tokens_at(by_query, batch, rows, columns)
        tl.store(at, grad.to(by_query.at.dtype.element_ty), mask=real)
    flagged = load_row(saved.flags, batch, tile, part, True, 0) != 0
    scale = tl.where(flagged, 0.0, tl.exp(-log))
    # 0 · NaN would spoil the whole product.
    by_term = tl.where(scale == 0, 0.0, scale * by_mean)
    by_weight = tl.where(scale == 0, 0.0, scale * (by_log - by_mean * mean))
    weight = tl.full([TILE], 1.0, tl.float32)
    if sums is not None:
        weight = tl.exp(-load_shifts(inputs.shifts, batch, rows, rows < where.targets))
    pair = tl.interleave(by_term, by_weight)
    store_terms(terms, sums, pair, weight, tile, batch, part, 2 * WIDTH)


@triton.jit
def load_unit(units, batch, tile, numbers, channels):
    """The unit of a tile, for each number of its terms."""
    return load_row(units, batch, tile, numbers // 2, numbers < 2 * channels, 0.0)


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
    """Sums over all tiles up to each one, or REVERSED from it on, in the unit of that tile."""
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
                own = own + (load_row(units, batch, tile, numbers // 2, inside, 0.0),)
        for i in tl.static_range(AT_ONCE):
            tile = tl.cast(tiles - 1 - start - i if REVERSED else start + i, tl.int64)
            if CAUSAL:
                # Units rise with the tile: this is at most 1, and nothing is lost of what counts.
                step = own[i] - before if REVERSED else before - own[i]
                total *= tl.exp(tl.where(start + i == 0, 0.0, step))
                before = own[i]
            total += parts[i]
            tl.store(totals + at + tile * sums.token, total, mask=(tile >= 0) & (tile < tiles))
