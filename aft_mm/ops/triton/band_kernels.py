"""Kernels of AFT-full and AFT-local 1-d, ``y_t = g(q_t) n_t / d_t`` with n = W (E v), d = W E.

``E = e^{k − shift}`` with one shift per sequence and channel, the largest key. `key_ranges` and
`bias_ranges` find it and whether float32 holds the result (`band_library.py`). `key_terms` writes
E v and E once, in the type in which they are multiplied; `forward` multiplies tiles of W with them.

Backward, with o = n/d and a = dy g(q)/d, c = −a o from `mean_terms`, the same products with Wᵀ:

    A = Wᵀ a    C = Wᵀ c    dv = E A    dk = E (v A + C)    dw = W ⊙ (a (E v)ᵀ + c Eᵀ)

where dw sums over sequences and channels. Nothing is added atomically: results do not vary.
"""

import triton
import triton.language as tl

from .band_tiles import (
    TINY,
    band_sums,
    bias_tile,
    load_keys,
    load_pair,
    load_terms,
    locate,
    pair_at,
    span,
    store_terms,
    tile_at,
    visible,
    weight_tile,
)
from .products import multiply
from .rows import gate_slope, gate_value

UNSPECIALIZED = [
    'tokens',
    'sources',
    'batches',
    'before',
    'after',
    'radius',
    'reach',
    'steps',
]


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_ranges(
    ranges, key, key_mask, tokens, channels, batches, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """Largest and smallest visible key of each tile, ranges [2, B, tiles, D]."""
    tile, batch, rows, columns, real = locate(tokens, channels, batches, BLOCK, WIDTH)
    keys, seen = load_keys(key, key_mask, batch, rows, columns, real, tokens)
    at = ranges[0] + batch * ranges[2] + tile.to(tl.int64) * ranges[3] + columns
    high = tl.max(tl.where(seen, keys, float('-inf')), 0)
    tl.store(at, high, mask=columns < channels)
    low = tl.min(tl.where(seen, keys, float('inf')), 0)
    tl.store(at + ranges[1], low, mask=columns < channels)


@triton.jit
def locate_pair(tokens, before, reach, DENSE: tl.constexpr, BLOCK: tl.constexpr):
    """The tile of rows of this program, the index of its tile of columns, and that tile."""
    tiles = tl.cdiv(tokens, BLOCK)
    tile = tl.program_id(0) % tiles
    slot = tl.program_id(0) // tiles % reach
    return tile, slot, slot if DENSE else tile - before + slot


@triton.jit(do_not_specialize=UNSPECIALIZED)
def bias_ranges(
    ranges,
    bias,
    other,
    tokens,
    sources,
    before,
    reach,
    radius,
    RANK: tl.constexpr,
    CAUSAL: tl.constexpr,
    DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Largest and smallest visible w of each row in a tile, ranges [2, reach, T]."""
    tile, slot, column_tile = locate_pair(tokens, before, reach, DENSE, BLOCK)
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    columns = column_tile * BLOCK + tl.arange(0, BLOCK)
    _, near = visible(rows, columns, tokens, sources, radius, CAUSAL, False)
    w = bias_tile(bias, other, rows, columns, tokens, sources, near, RANK, BLOCK)
    near &= w != float('-inf')
    at = ranges[0] + slot.to(tl.int64) * ranges[2] + rows
    tl.store(at, tl.max(tl.where(near, w, float('-inf')), 1), mask=rows < tokens)
    tl.store(at + ranges[1], tl.min(tl.where(near, w, float('inf')), 1), mask=rows < tokens)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def key_terms(
    terms,
    sums,
    key,
    value,
    key_mask,
    shift,
    tokens,
    channels,
    room,
    batches,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """E v and E into terms [2, B, S, room], and their sums over each tile unless `sums` is None."""
    tile, batch, rows, columns, real = locate(tokens, channels, batches, BLOCK, WIDTH)
    weight, values = load_terms(
        key, value, key_mask, shift, batch, rows, columns, real, tokens, channels
    )
    store_terms(
        terms, sums, weight * values, weight, tile, batch, rows, columns, tokens, channels, room
    )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward(
    output,
    saved,
    query,
    terms,
    past,
    future,
    bias,
    other,
    shifts,
    tokens,
    sources,
    channels,
    room,
    batches,
    before,
    after,
    radius,
    GATE: tl.constexpr,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Output, and n/d and d into saved [2, B, T, D] unless that is None."""
    tile, batch, rows, columns, real = locate(tokens, channels, batches, BLOCK, WIDTH)
    numerator, denominator = band_sums(
        terms,
        past,
        future,
        bias,
        other,
        shifts,
        tile,
        batch,
        rows,
        columns,
        tokens,
        sources,
        channels,
        room,
        before,
        after,
        radius,
        RANK,
        PRECISION,
        CAUSAL,
        False,
        BLOCK,
        WIDTH,
    )
    mean = numerator / tl.maximum(denominator, TINY)
    if saved is not None:
        at, other_at = pair_at(saved, batch, rows, columns)
        tl.store(at, mean, mask=real)
        tl.store(other_at, denominator, mask=real)
    if GATE != 'none':
        queries = tl.load(tile_at(query, batch, rows, columns), mask=real, other=0.0)
        mean *= gate_value(queries, GATE)
    at = tile_at(output, batch, rows, columns)
    tl.store(at, mean.to(output[0].dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def mean_terms(
    query_gradient,
    terms,
    sums,
    saved,
    gradient,
    query,
    tokens,
    channels,
    room,
    batches,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The gradient of query, a and c into terms [2, B, T, room], their sums as in `key_terms`."""
    tile, batch, rows, columns, real = locate(tokens, channels, batches, BLOCK, WIDTH)
    mean, denominator = load_pair(saved, batch, rows, columns, tokens, channels)
    grad = tl.load(tile_at(gradient, batch, rows, columns), mask=real, other=0.0).to(tl.float32)
    if GATE != 'none':
        queries = tl.load(tile_at(query, batch, rows, columns), mask=real, other=0.0)
        by_query = grad * mean * gate_slope(queries, GATE)
        at = tile_at(query_gradient, batch, rows, columns)
        tl.store(at, by_query.to(query_gradient[0].dtype.element_ty), mask=real)
        grad *= gate_value(queries, GATE)
    # A row that sees nothing is 0 whatever the keys are.
    scale = tl.where(denominator < TINY, 0.0, grad / tl.maximum(denominator, TINY))
    store_terms(
        terms, sums, scale, -scale * mean, tile, batch, rows, columns, tokens, channels, room
    )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward(
    key_gradient,
    value_gradient,
    key,
    value,
    key_mask,
    shift,
    terms,
    past,
    future,
    bias,
    other,
    shifts,
    tokens,
    sources,
    channels,
    room,
    batches,
    before,
    after,
    radius,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The gradients of key and value; `before`, `after`, bias and other are those of Wᵀ."""
    tile, batch, rows, columns, real = locate(sources, channels, batches, BLOCK, WIDTH)
    by_term, by_weight = band_sums(
        terms,
        past,
        future,
        bias,
        other,
        shifts,
        tile,
        batch,
        rows,
        columns,
        sources,
        tokens,
        channels,
        room,
        before,
        after,
        radius,
        RANK,
        PRECISION,
        CAUSAL,
        True,
        BLOCK,
        WIDTH,
    )
    weight, values = load_terms(
        key, value, key_mask, shift, batch, rows, columns, real, sources, channels
    )
    by_key = weight * (values * by_term + by_weight)
    at = tile_at(key_gradient, batch, rows, columns)
    tl.store(at, by_key.to(key_gradient[0].dtype.element_ty), mask=real)
    at = tile_at(value_gradient, batch, rows, columns)
    tl.store(at, (weight * by_term).to(value_gradient[0].dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def bias_gradient(
    gradient,
    source_terms,
    target_terms,
    bias,
    other,
    shifts,
    tokens,
    sources,
    channels,
    room,
    batches,
    before,
    reach,
    radius,
    steps,
    RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile of the gradient of w, summed over `steps` blocks of WIDTH channels.

    Written to gradient = (pointer, strides of part, tile, target and source, origin).
    """
    tile, slot, column_tile = locate_pair(tokens, before, reach, shifts is not None, BLOCK)
    part = tl.program_id(0) // (tl.cdiv(tokens, BLOCK) * reach)
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    columns = column_tile * BLOCK + tl.arange(0, BLOCK)
    parts = tl.cdiv(channels, WIDTH)
    first = part * steps
    last = tl.minimum(first + steps, batches * parts)
    # Beside the sequence or above the diagonal there is nothing to sum.
    exists = (column_tile >= 0) & (column_tile * BLOCK < sources)
    if CAUSAL:
        exists &= column_tile <= tile
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in span(first, tl.where(exists, last, first)):
        batch = (step // parts).to(tl.int64)
        places = (step % parts) * WIDTH + tl.arange(0, WIDTH)
        scale, offset = load_pair(target_terms, batch, rows, places, tokens, room)
        term, weight = load_pair(source_terms, batch, columns, places, sources, room)
        total = multiply(scale, tl.trans(term), total, PRECISION)
        total = multiply(offset, tl.trans(weight), total, PRECISION)
    weights, near = weight_tile(
        bias,
        other,
        shifts,
        rows,
        columns,
        tokens,
        sources,
        radius,
        RANK,
        CAUSAL,
        False,
        BLOCK,
    )
    rows, columns = rows.to(tl.int64), columns.to(tl.int64)
    at = gradient[0] + part.to(tl.int64) * gradient[1] + tile.to(tl.int64) * gradient[2]
    at += rows[:, None] * gradient[3] + columns[None, :] * gradient[4] + gradient[5]
    tl.store(at, weights * total, mask=near)
