"""Recomputation of flagged tiles, term by term: exact for every finite key and bias.

Each row and channel has its own unit, the largest key that the row sees, and the weights ``exp((k −
unit) + (w − shift))`` are summed relative to their largest term. The brackets keep the differences
small, so keys of ±1e4 lose no digits.

The kernels are always launched, as the host would wait for the flags.
"""

import triton
import triton.language as tl

from .matmul import TINY, item_at, store_rows, tiles_of_gradient
from .online_softmax import LOWEST, Bools, Floats, Ints, Strided, entry_pointer, load_entry
from .operands import UNSEEN, load_gradient, load_keys
from .weights import (
    BiasTable,
    Extents,
    MatmulInputs,
    MatmulSaved,
    bias_pointer,
    load_bias,
    load_tile,
    span,
    store_tile,
    visible_pairs,
)

FLAGS_AT_ONCE = tl.constexpr(2048)


@triton.jit
def is_flagged(flags: 'Strided', batch: 'Ints', tile: 'Ints', part: 'Ints') -> 'Bools':
    return tl.load(entry_pointer(flags, batch, tile, part)) != 0


@triton.jit
def pieces_to_check(
    pieces: 'Ints', flags: 'Strided', extents: 'Extents', FORM: tl.constexpr
) -> 'Ints':
    """The number of pieces of work, or 0 if no tile is flagged."""
    tiles = tl.cdiv(extents.targets, FORM.tile)
    number = extents.batches * tiles * tl.cdiv(extents.channels, FORM.width)
    flagged = tl.zeros([FLAGS_AT_ONCE], tl.int32)
    for first in span(0, number, FLAGS_AT_ONCE):
        at = first + tl.arange(0, FLAGS_AT_ONCE)
        flag = tl.load(flags[0] + at, mask=at < number, other=0)  # [FLAGS_AT_ONCE]
        flagged |= (flag != 0).to(tl.int32)
    return tl.where(tl.max(flagged, 0) != 0, pieces, 0)


@triton.jit
def locate_piece(
    index: 'Ints', extents: 'Extents', tokens: 'Ints', FORM: tl.constexpr
) -> 'tuple[Ints, Ints, Ints, Ints]':
    """Return sequence, first token, block of channels and channels of piece `index`."""
    parts = tl.cdiv(extents.channels, FORM.width)
    groups = tl.cdiv(tokens, FORM.group)
    part = index % parts
    batch = (index // parts // groups).to(tl.int64)
    first = index // parts % groups * FORM.group
    return batch, first, part, part * FORM.width + tl.arange(0, FORM.width)


@triton.jit
def load_pairs(
    inputs: 'MatmulInputs',
    batch: 'Ints',
    row: 'Ints',
    other: 'Ints',
    columns: 'Ints',
    FORM: tl.constexpr,
) -> 'tuple[Floats, Floats, Bools, Bools]':
    """Load keys [group, C] and w − shift of the pairs; which keys and which pairs are visible."""
    offsets = tl.arange(0, FORM.group)
    rows = row + offsets
    keys, shown = load_keys(inputs, batch, other + offsets, columns)  # [group, C]
    w, visible, _ = load_bias(
        inputs.bias, inputs.extents, batch, row, other, offsets[:, None], offsets[None, :], FORM
    )  # [group, group]
    shift = load_entry(inputs.shifts, batch, 0, rows, rows < inputs.extents.targets)  # [group]
    return keys, w - shift[:, None], shown, visible[:, :, None] & shown[None, :, :]


@triton.jit
def exact_rows(
    inputs: 'MatmulInputs',
    batch: 'Ints',
    row: 'Ints',
    columns: 'Ints',
    last: 'Ints',
    FORM: tl.constexpr,
) -> 'tuple[Floats, Floats, Floats]':
    """Return the mean, λ and its unit of rows [group, C] over the sources before `last`."""
    GROUP: tl.constexpr = FORM.group
    zero = tl.zeros([GROUP, columns.shape[0]], tl.float32)
    unit = zero + LOWEST
    for start in span(0, last, GROUP):
        keys, _, _, visible = load_pairs(inputs, batch, row, start, columns, FORM)
        unit = tl.maximum(unit, tl.max(tl.where(visible, keys[None, :, :], LOWEST), 1))
    high, numerator, denominator = zero + LOWEST, zero, zero
    for start in span(0, last, GROUP):
        others = start + tl.arange(0, GROUP)
        keys, w, shown, visible = load_pairs(inputs, batch, row, start, columns, FORM)
        values = load_tile(inputs.value, batch, others, columns, shown)  # [group, C]
        exponent = (keys[None, :, :] - unit[:, None, :]) + w[:, :, None]
        top = tl.maximum(high, tl.max(tl.where(visible, exponent, LOWEST), 1))
        weight = tl.where(visible, tl.exp(exponent - top[:, None, :]), 0.0)
        old = tl.exp(high - top)
        # Not 0 · value, which may be NaN.
        terms = tl.where(visible, weight * values[None, :, :], 0.0)
        numerator = numerator * old + tl.sum(terms, 1)
        denominator = denominator * old + tl.sum(weight, 1)
        high = top
    sees_any = denominator != 0
    mean = numerator / tl.where(sees_any, denominator, 1.0)
    return mean, tl.where(sees_any, high + tl.log(tl.maximum(denominator, TINY)), UNSEEN), unit


@triton.jit
def product_recompute_rows_kernel(
    saved: 'MatmulSaved', inputs: 'MatmulInputs', FORM: tl.constexpr, GATE: tl.constexpr
) -> None:
    """Write what `saved` has room for: mean, λ and its unit, and the output."""
    extents = inputs.extents
    pieces = tl.cdiv(extents.targets, FORM.group) * tl.cdiv(extents.channels, FORM.width)
    pieces = pieces_to_check(pieces * extents.batches, saved.flags, extents, FORM)
    for index in span(tl.program_id(0), pieces, tl.num_programs(0)):
        batch, row, part, columns = locate_piece(index, extents, extents.targets, FORM)
        if is_flagged(saved.flags, batch, row // FORM.tile, part):
            rows = row + tl.arange(0, FORM.group)
            real = (rows < extents.targets)[:, None] & (columns < extents.channels)[None, :]
            last = extents.sources
            if FORM.causal:
                last = tl.minimum(row + FORM.group, extents.sources)
            mean, log, unit = exact_rows(inputs, batch, row, columns, last, FORM)
            store_tile(saved.unit, batch, rows, columns, real, unit)
            store_rows(saved, inputs.query, mean, log, batch, rows, columns, real, GATE)


@triton.jit
def load_weights(
    saved: 'MatmulSaved',
    inputs: 'MatmulInputs',
    batch: 'Ints',
    row: 'Ints',
    other: 'Ints',
    columns: 'Ints',
    FORM: tl.constexpr,
    GATE: tl.constexpr,
) -> 'tuple[Floats, Floats]':
    """Return ``p α`` and ``p α (v − o)`` of the pairs, with ``p = W e^k / d``."""
    rows, others = row + tl.arange(0, FORM.group), other + tl.arange(0, FORM.group)
    keys, w, shown, visible = load_pairs(inputs, batch, row, other, columns, FORM)
    values = load_tile(inputs.value, batch, others, columns, shown)  # [group, C]
    extents = inputs.extents
    real = (rows < extents.targets)[:, None] & (columns < extents.channels)[None, :]
    mean = load_tile(saved.mean, batch, rows, columns, real)  # [group, C]
    log = load_tile(saved.log, batch, rows, columns, real, UNSEEN)  # [group, C]
    unit = load_tile(saved.unit, batch, rows, columns, real)  # [group, C]
    grad_mean = load_gradient(saved, inputs, batch, rows, columns, real, GATE)  # [group, C]
    exponent = (keys[None, :, :] - unit[:, None, :]) + w[:, :, None] - log[:, None, :]
    weight = tl.where(visible & (log != UNSEEN)[:, None, :], tl.exp(exponent), 0.0)
    grad_value = weight * grad_mean[:, None, :]
    difference = values[None, :, :] - mean[:, None, :]
    return grad_value, grad_value * difference


@triton.jit
def product_recompute_sources_kernel(
    grad_key: 'Strided',
    grad_value: 'Strided',
    saved: 'MatmulSaved',
    inputs: 'MatmulInputs',
    FORM: tl.constexpr,
    GATE: tl.constexpr,
) -> None:
    """Add the part of flagged tiles to the gradients of key and value."""
    GROUP: tl.constexpr = FORM.group
    WIDTH: tl.constexpr = FORM.width
    extents = inputs.extents
    tiles = tl.cdiv(extents.targets, FORM.tile)
    pieces = tl.cdiv(extents.sources, GROUP) * tl.cdiv(extents.channels, WIDTH)
    pieces = pieces_to_check(pieces * extents.batches, saved.flags, extents, FORM)
    for index in span(tl.program_id(0), pieces, tl.num_programs(0)):
        batch, other, part, columns = locate_piece(index, extents, extents.sources, FORM)
        first = 0
        if FORM.causal:
            first = other // FORM.tile
        key_total = tl.zeros([GROUP, WIDTH], tl.float32)
        value_total = tl.zeros([GROUP, WIDTH], tl.float32)
        changed = 0
        for tile in span(first, tiles):
            if is_flagged(saved.flags, batch, tile, part):
                changed = 1
                last = tl.minimum((tile + 1) * FORM.tile, extents.targets)
                for row in span(tile * FORM.tile, last, GROUP):
                    values, keys = load_weights(
                        saved, inputs, batch, row, other, columns, FORM, GATE
                    )
                    value_total += tl.sum(values, 0)
                    key_total += tl.sum(keys, 0)
        if changed != 0:
            others = other + tl.arange(0, GROUP)
            real = (others < extents.sources)[:, None] & (columns < extents.channels)[None, :]
            key_total += load_tile(grad_key, batch, others, columns, real)  # [GROUP, WIDTH]
            store_tile(grad_key, batch, others, columns, real, key_total)
            value_total += load_tile(grad_value, batch, others, columns, real)  # [GROUP, WIDTH]
            store_tile(grad_value, batch, others, columns, real, value_total)


@triton.jit
def count_flags(
    flags: 'Strided',
    owner: 'Ints',
    other: 'Ints',
    first: 'Ints',
    last: 'Ints',
    parts: 'Ints',
    FORM: tl.constexpr,
) -> 'Ints':
    """Count the flags, of all channels, for these items of a tile of the gradient of w."""
    count = 0
    for item in span(first, last):
        batch, tile, _ = item_at(owner, other, item, FORM)
        for start in span(0, parts, 32):
            part = start + tl.arange(0, 32)
            flagged = load_entry(flags, batch, tile, part, part < parts)  # [32]
            count += tl.sum(flagged.to(tl.int32), 0)
    return count


@triton.jit
def product_recompute_bias_kernel(
    grad_bias: 'BiasTable',
    saved: 'MatmulSaved',
    inputs: 'MatmulInputs',
    pairs: 'Ints',
    FORM: tl.constexpr,
    GATE: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = FORM.group
    extents = inputs.extents
    parts = tl.cdiv(extents.channels, FORM.width)
    groups = FORM.tile // GROUP
    pieces = pieces_to_check(pairs * groups, saved.flags, extents, FORM)
    for index in span(tl.program_id(0), pieces, tl.num_programs(0)):
        first, last, owner, other = tiles_of_gradient(extents, index // groups, FORM)
        if count_flags(saved.flags, owner, other, first, last, parts, FORM) != 0:
            offsets = tl.arange(0, GROUP)
            rows, others = offsets[:, None], offsets[None, :]
            for start in span(0, FORM.tile, GROUP):
                total = tl.zeros([GROUP, GROUP], tl.float32)
                for step in span(first * parts, last * parts):
                    batch, tile, met = item_at(owner, other, step // parts, FORM)
                    if is_flagged(saved.flags, batch, tile, step % parts):
                        columns = step % parts * FORM.width + tl.arange(0, FORM.width)
                        row = tile * FORM.tile + index % groups * GROUP
                        other_row = met * FORM.tile + start
                        _, pair_grads = load_weights(
                            saved, inputs, batch, row, other_row, columns, FORM, GATE
                        )
                        total += tl.sum(pair_grads, 2)
                batch, tile, met = item_at(owner, other, first, FORM)
                row = tile * FORM.tile + index % groups * GROUP
                column = met * FORM.tile + start
                at = bias_pointer(grad_bias, batch, row, column, rows, others, FORM)
                if FORM.shared:  # nothing outside the window is read
                    near = rows + others >= 0
                else:
                    _, near = visible_pairs(extents, row + rows, column + others, FORM)
                stored = tl.load(at, mask=near, other=0.0)  # [GROUP, GROUP]
                tl.store(at, stored + total, mask=near)
