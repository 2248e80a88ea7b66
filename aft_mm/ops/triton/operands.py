"""Operands of the products: terms of the sources and of the targets, written once per call.

``E = e^{k − unit}`` has a unit per tile and channel: the largest key of the sequence, or for causal
ops of the tile and all tiles before it, all of which are visible to later tiles. The two terms of a
channel are adjacent: (E (v − m), E) of a source; (a, c) of a target, for the gradient.

The centre m of a sequence and channel is the mean of its first tile of values. Without it
gradients, sums of W E (v − o), would be wrong for values far from 0, as tensor cores cut operands
to 11 bits.

terms [B, tokens, N] have N = 2 · channels numbers, padded with 0 to whole tiles and blocks.
"""

import triton
import triton.language as tl

from .online_softmax import (
    LOWEST,
    Bools,
    Floats,
    Ints,
    Pointers,
    Strided,
    entry_pointer,
    gate_slope,
    gate_value,
    load_entry,
    store_entry,
)
from .weights import Extents, MatmulInputs, MatmulSaved, load_tile, span, store_tile

# λ of a row that sees nothing: its weights e^−λ are 0.
UNSEEN = tl.constexpr(1e30)
# Tiles that `product_running_sums_kernel` loads at once.
AT_ONCE = tl.constexpr(8)


@triton.jit
def locate_program(
    extents: 'Extents', TILE: tl.constexpr, WIDTH: tl.constexpr, SHARED: tl.constexpr
) -> 'tuple[Ints, Ints, Ints, Ints, Ints]':
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
def load_keys(
    inputs: 'MatmulInputs', batch: 'Ints', rows: 'Ints', columns: 'Ints'
) -> 'tuple[Floats, Bools]':
    real = (rows < inputs.extents.sources)[:, None] & (columns < inputs.extents.channels)[None, :]
    keys = load_tile(inputs.key, batch, rows, columns, real)  # [rows, columns]
    visible = real & (keys != float('-inf'))
    if inputs.key_mask is not None:
        mask = inputs.key_mask
        at = mask[0] + batch * mask[1] + rows.to(tl.int64) * mask[2]
        shown = tl.load(at, mask=rows < inputs.extents.sources, other=0)  # [rows]
        visible &= (shown != 0)[:, None]
    return keys, visible


@triton.jit
def load_source(
    inputs: 'MatmulInputs',
    units: 'Strided',
    batch: 'Ints',
    tile: 'Ints',
    rows: 'Ints',
    columns: 'Ints',
) -> 'tuple[Floats, Floats]':
    """Return E and v − m of these tokens; E is 0 where the key is hidden."""
    keys, visible = load_keys(inputs, batch, rows, columns)  # [TILE, WIDTH]
    values = load_tile(inputs.value, batch, rows, columns, visible)  # [TILE, WIDTH]
    inside = columns < inputs.extents.channels
    unit = load_entry(units, batch, tile, columns, inside)  # [WIDTH]
    values -= load_entry(inputs.centre, batch, 0, columns, inside)  # [WIDTH]
    return tl.where(visible, tl.exp(keys - unit[None, :]), 0.0), values


@triton.jit
def terms_at(
    x: 'Strided',
    batch: 'Ints',
    token: 'Ints',
    number: 'Ints',
    TOKENS: tl.constexpr,
    NUMBERS: tl.constexpr,
) -> 'Pointers':
    tokens, numbers = tl.arange(0, TOKENS), tl.arange(0, NUMBERS)
    return entry_pointer(x, batch, token, number) + (
        tokens[:, None] * x[2] + numbers[None, :] * x[3]
    )


@triton.jit
def store_terms(
    terms: 'Strided',
    sums: 'Strided | None',
    pair: 'Floats',
    weight: 'Floats',
    tile: 'Ints',
    batch: 'Ints',
    part: 'Ints',
    NUMBERS: tl.constexpr,
) -> None:
    at = terms_at(terms, batch, tile * weight.shape[0], part * NUMBERS, weight.shape[0], NUMBERS)
    tl.store(at, pair.to(terms[0].dtype.element_ty))
    if sums is not None:
        numbers = part * NUMBERS + tl.arange(0, NUMBERS)
        tl.store(entry_pointer(sums, batch, tile, numbers), tl.sum(pair * weight[:, None], 0))


@triton.jit
def product_maxima_kernel(
    maxima: 'Strided',
    firsts: 'Strided',
    inputs: 'MatmulInputs',
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute the centre, and the largest (LOWEST if none) and first visible key of tiles."""
    extents = inputs.extents
    tile, batch, _, rows, columns = locate_program(extents, TILE, WIDTH, False)
    keys, visible = load_keys(inputs, batch, rows, columns)  # [TILE, WIDTH]
    inside = columns < extents.channels
    high = tl.max(tl.where(visible, keys, LOWEST), 0)
    store_entry(maxima, batch, tile, columns, inside, high)
    first = tl.min(tl.where(visible, rows[:, None], extents.sources), 0)
    store_entry(firsts, batch, tile, columns, inside, first)
    if tile == 0:
        values = load_tile(inputs.value, batch, rows, columns, visible)  # [TILE, WIDTH]
        number = tl.sum(visible.to(tl.float32), 0)
        centre = tl.sum(values, 0) / tl.maximum(number, 1.0)
        centre = tl.where(tl.abs(centre) < float('inf'), centre, 0.0)
        store_entry(inputs.centre, batch, 0, columns, inside, centre)


@triton.jit
def product_key_terms_kernel(
    terms: 'Strided',
    sums: 'Strided | None',
    inputs: 'MatmulInputs',
    units: 'Strided',
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute (E (v − m), E) and, unless `sums` is None, their sums over each tile."""
    tile, batch, part, rows, columns = locate_program(inputs.extents, TILE, WIDTH, False)
    weight, values = load_source(inputs, units, batch, tile, rows, columns)  # [TILE, WIDTH]
    pair = tl.interleave(weight * values, weight)
    store_terms(terms, sums, pair, tl.full([TILE], 1.0, tl.float32), tile, batch, part, 2 * WIDTH)


@triton.jit
def load_gradient(
    saved: 'MatmulSaved',
    inputs: 'MatmulInputs',
    batch: 'Ints',
    rows: 'Ints',
    columns: 'Ints',
    real: 'Bools',
    GATE: tl.constexpr,
) -> 'Floats':
    grad_mean = load_tile(saved.gradient, batch, rows, columns, real)  # [TILE, WIDTH]
    if GATE != 'none':
        query = load_tile(inputs.query, batch, rows, columns, real)  # [TILE, WIDTH]
        grad_mean *= gate_value(query, GATE)
    return grad_mean


@triton.jit
def product_target_terms_kernel(
    grad_query: 'Strided | None',
    terms: 'Strided',
    sums: 'Strided | None',
    saved: 'MatmulSaved',
    inputs: 'MatmulInputs',
    GATE: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """Compute the gradient of query, and a and c, which are 0 in flagged tiles, with their sums.

    The sums are for sources outside the window, which have ``W = e^−shift``.
    """
    extents = inputs.extents
    tile, batch, part, rows, columns = locate_program(extents, TILE, WIDTH, False)
    real = (rows < extents.targets)[:, None] & (columns < extents.channels)[None, :]
    mean = load_tile(saved.mean, batch, rows, columns, real)  # [TILE, WIDTH]
    log = load_tile(saved.log, batch, rows, columns, real, UNSEEN)  # [TILE, WIDTH]
    grad_mean = load_gradient(saved, inputs, batch, rows, columns, real, GATE)
    if grad_query is not None:
        grad = load_tile(saved.gradient, batch, rows, columns, real) * mean  # [TILE, WIDTH]
        query = load_tile(inputs.query, batch, rows, columns, real)  # [TILE, WIDTH]
        grad *= gate_slope(query, GATE)
        store_tile(grad_query, batch, rows, columns, real, grad)
    flagged = load_entry(saved.flags, batch, tile, part, True) != 0  # []
    scale = tl.where(flagged, 0.0, tl.exp(-log))
    # Not 0 · NaN, which would make the whole product NaN.
    grad_term = tl.where(scale == 0, 0.0, scale * grad_mean)
    mean -= load_entry(inputs.centre, batch, 0, columns, columns < extents.channels)  # [WIDTH]
    grad_weight = tl.where(scale == 0, 0.0, -scale * grad_mean * mean)
    weight = tl.full([TILE], 1.0, tl.float32)
    if sums is not None:
        shift = load_entry(inputs.shifts, batch, 0, rows, rows < extents.targets)  # [TILE]
        weight = tl.exp(-shift)
    pair = tl.interleave(grad_term, grad_weight)
    store_terms(terms, sums, pair, weight, tile, batch, part, 2 * WIDTH)


@triton.jit
def load_unit(
    units: 'Strided', batch: 'Ints', tile: 'Ints', numbers: 'Ints', channels: 'Ints'
) -> 'Floats':
    return load_entry(units, batch, tile, numbers // 2, numbers < 2 * channels)


@triton.jit
def product_running_sums_kernel(
    totals: 'Strided',
    sums: 'Strided',
    units: 'Strided',
    sizes: 'tuple[Ints, Ints, Ints]',
    CAUSAL: tl.constexpr,
    REVERSED: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Compute sums over all tiles up to each tile, or REVERSED from it on, in its unit."""
    tiles, channels, blocks = sizes
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    numbers = tl.program_id(0) % blocks * SIZE + tl.arange(0, SIZE)
    total = tl.zeros([SIZE], tl.float32)
    before = tl.zeros([SIZE], tl.float32)
    for start in span(0, tiles, AT_ONCE):
        parts, tile_units = (), ()
        for i in tl.static_range(AT_ONCE):
            tile = tl.cast(tiles - 1 - start - i if REVERSED else start + i, tl.int64)
            real = (tile >= 0) & (tile < tiles)
            part = load_entry(sums, batch, tile, numbers, real)  # [SIZE]
            parts = parts + (part,)  # type: ignore[assignment]
            if CAUSAL:
                inside = real & (numbers < 2 * channels)
                unit = load_entry(units, batch, tile, numbers // 2, inside)  # [SIZE]
                tile_units = tile_units + (unit,)  # type: ignore[assignment]
        for i in tl.static_range(AT_ONCE):
            tile = tl.cast(tiles - 1 - start - i if REVERSED else start + i, tl.int64)
            if CAUSAL:
                # Units never decrease, so the factor is at most 1.
                step = tile_units[i] - before if REVERSED else before - tile_units[i]
                total *= tl.exp(tl.where(start + i == 0, 0.0, step))
                before = tile_units[i]
            total += parts[i]
            real = (tile >= 0) & (tile < tiles)
            store_entry(totals, batch, tile, numbers, real, total)
