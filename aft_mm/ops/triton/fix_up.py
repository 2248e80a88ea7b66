"""Flagged tiles once more, term by term: exact for every finite key and bias.

Each row and channel has a unit of its own, the largest key that it sees, and the sum of
``exp((k − unit) + (w − shift))`` is taken over its largest term. Differences stand in brackets, so
that keys of ±1e4 lose nothing. Always launched, on as many programs as the device holds, which look
at the flags and return; what they redo takes as many exponentials as there are pairs. SOME targets
and SOME sources are weighed at once, for the channels of a block.
"""

import triton
import triton.language as tl

from .bias import bias_pointer, load_bias, load_shifts, span, tokens_at, visible
from .product import TINY, item_at, store_output, tiles_of_gradient
from .rows import LOWEST
from .terms import UNSEEN, load_gradient, load_keys


@triton.jit
def flagged(flags, batch, tile, part):
    """Whether this tile must be done once more."""
    at = flags.at + batch * flags.batch + tile * flags.token + part
    return tl.load(at) != 0


@triton.jit
def place_group(index, where, tokens, WIDTH: tl.constexpr, SOME: tl.constexpr):
    """Sequence, first of SOME tokens, block of channels, and the channels, of so many pieces."""
    parts = tl.cdiv(where.channels, WIDTH)
    groups = tl.cdiv(tokens, SOME)
    part = index % parts
    batch = (index // parts // groups).to(tl.int64)
    return batch, index // parts % groups * SOME, part, part * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def load_pairs(inputs, batch, row, other, columns, FORM: tl.constexpr, SOME: tl.constexpr):
    """Keys [SOME, C], w − shift of targets and sources, and which of keys and pairs are seen."""
    some = tl.arange(0, SOME)
    rows = row + some
    keys, shown = load_keys(inputs, batch, other + some, columns)
    w, seen, _ = load_bias(
        inputs.bias, inputs.where, batch, row, other, some[:, None], some[None, :], FORM
    )
    shift = load_shifts(inputs.shifts, batch, rows, rows < inputs.where.targets)
    return keys, w - shift[:, None], shown, seen[:, :, None] & shown[None, :, :]


@triton.jit
def exact_rows(inputs, batch, row, columns, last, FORM: tl.constexpr, SOME: tl.constexpr):
    """Mean, λ and its unit of SOME rows [SOME, C], over the sources before `last`."""
    zero = tl.zeros([SOME, columns.shape[0]], tl.float32)
    unit = zero + LOWEST
    for start in span(0, last, SOME):
        keys, _, _, seen = load_pairs(inputs, batch, row, start, columns, FORM, SOME)
        unit = tl.maximum(unit, tl.max(tl.where(seen, keys[None, :, :], LOWEST), 1))
    high, numerator, denominator = zero + LOWEST, zero, zero
    for start in span(0, last, SOME):
        others = start + tl.arange(0, SOME)
        keys, w, shown, seen = load_pairs(inputs, batch, row, start, columns, FORM, SOME)
        values = tl.load(tokens_at(inputs.value, batch, others, columns), mask=shown, other=0.0)
        exponent = (keys[None, :, :] - unit[:, None, :]) + w[:, :, None]
        top = tl.maximum(high, tl.max(tl.where(seen, exponent, LOWEST), 1))
        weight = tl.where(seen, tl.exp(exponent - top[:, None, :]), 0.0)
        old = tl.exp(high - top)
        # A row that does not see a value is not reached by its NaN, which 0 times it would be.
        terms = tl.where(seen, weight * values.to(tl.float32)[None, :, :], 0.0)
        numerator = numerator * old + tl.sum(terms, 1)
        denominator = denominator * old + tl.sum(weight, 1)
        high = top
    some = denominator != 0
    mean = numerator / tl.where(some, denominator, 1.0)
    return mean, tl.where(some, high + tl.log(tl.maximum(denominator, TINY)), UNSEEN), unit


@triton.jit
def fix_rows(
    result,
    inputs,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    SOME: tl.constexpr,
):
    """The forward pass."""
    where = inputs.where
    pieces = tl.cdiv(where.targets, SOME) * where.batches * tl.cdiv(where.channels, WIDTH)
    for index in span(tl.program_id(0), pieces, tl.num_programs(0)):
        batch, row, part, columns = place_group(index, where, where.targets, WIDTH, SOME)
        if flagged(result.flags, batch, row // FORM.tile, part):
            rows = row + tl.arange(0, SOME)
            real = (rows < where.targets)[:, None] & (columns < where.channels)[None, :]
            last = where.sources
            if FORM.causal:
                last = tl.minimum(row + SOME, where.sources)
            mean, log, unit = exact_rows(inputs, batch, row, columns, last, FORM, SOME)
            if result.mean is not None:
                tl.store(tokens_at(result.mean, batch, rows, columns), mean, mask=real)
                tl.store(tokens_at(result.log, batch, rows, columns), log, mask=real)
                tl.store(tokens_at(result.unit, batch, rows, columns), unit, mask=real)
            store_output(result, inputs.query, mean, batch, rows, columns, real, GATE)


@triton.jit
def load_weights(
    saved,
    inputs,
    batch,
    row,
    other,
    columns,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    SOME: tl.constexpr,
):
    """Of SOME targets and sources ``p = W e^k / d`` times α, and times ``α (v − o) + β``."""
    rows, others = row + tl.arange(0, SOME), other + tl.arange(0, SOME)
    keys, w, shown, seen = load_pairs(inputs, batch, row, other, columns, FORM, SOME)
    values = tl.load(tokens_at(inputs.value, batch, others, columns), mask=shown, other=0.0)
    where = inputs.where
    real = (rows < where.targets)[:, None] & (columns < where.channels)[None, :]
    mean = tl.load(tokens_at(saved.mean, batch, rows, columns), mask=real, other=0.0)
    log = tl.load(tokens_at(saved.log, batch, rows, columns), mask=real, other=UNSEEN)
    unit = tl.load(tokens_at(saved.unit, batch, rows, columns), mask=real, other=0.0)
    by_mean, by_log = load_gradient(saved, inputs, batch, rows, columns, real, GATE)
    exponent = (keys[None, :, :] - unit[:, None, :]) + w[:, :, None] - log[:, None, :]
    weight = tl.where(seen & (log != UNSEEN)[:, None, :], tl.exp(exponent), 0.0)
    by_value = weight * by_mean[:, None, :]
    difference = values.to(tl.float32)[None, :, :] - mean[:, None, :]
    return by_value, by_value * difference + weight * by_log[:, None, :]


@triton.jit
def add_to(x, batch, rows, columns, real, more):
    """Add to x [B, T, D]."""
    at = tokens_at(x, batch, rows, columns)
    total = tl.load(at, mask=real, other=0.0).to(tl.float32) + more
    tl.store(at, total.to(x.at.dtype.element_ty), mask=real)


@triton.jit
def fix_sources(
    by_key,
    by_value,
    saved,
    inputs,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    SOME: tl.constexpr,
):
    """What flagged tiles add to the gradients of key and value."""
    where = inputs.where
    tiles = tl.cdiv(where.targets, FORM.tile)
    pieces = tl.cdiv(where.sources, SOME) * where.batches * tl.cdiv(where.channels, WIDTH)
    for index in span(tl.program_id(0), pieces, tl.num_programs(0)):
        batch, other, part, columns = place_group(index, where, where.sources, WIDTH, SOME)
        first = 0
        if FORM.causal:
            first = other // FORM.tile
        key_total = tl.zeros([SOME, WIDTH], tl.float32)
        value_total = tl.zeros([SOME, WIDTH], tl.float32)
        found = 0
        for tile in span(first, tiles):
            if flagged(saved.flags, batch, tile, part):
                found = 1
                last = tl.minimum((tile + 1) * FORM.tile, where.targets)
                for row in span(tile * FORM.tile, last, SOME):
                    values, keys = load_weights(
                        saved, inputs, batch, row, other, columns, FORM, GATE, SOME
                    )
                    value_total += tl.sum(values, 0)
                    key_total += tl.sum(keys, 0)
        if found != 0:
            others = other + tl.arange(0, SOME)
            real = (others < where.sources)[:, None] & (columns < where.channels)[None, :]
            add_to(by_key, batch, others, columns, real, key_total)
            add_to(by_value, batch, others, columns, real, value_total)


@triton.jit
def any_flag(flags, own, other, first, last, parts, FORM: tl.constexpr):
    """How many flags there are for these items of a tile of the gradient of w, of all channels."""
    count = 0
    for item in span(first, last):
        batch, tile, _ = item_at(own, other, item, FORM)
        for start in span(0, parts, 32):
            part = start + tl.arange(0, 32)
            at = flags.at + batch * flags.batch + tile * flags.token + part
            count += tl.sum(tl.load(at, mask=part < parts, other=0).to(tl.int32), 0)
    return count


@triton.jit
def fix_bias(
    by_bias,
    saved,
    inputs,
    pairs,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    SOME: tl.constexpr,
):
    """What flagged tiles add to the gradient of w."""
    where = inputs.where
    parts = tl.cdiv(where.channels, WIDTH)
    groups = FORM.tile // SOME
    for index in span(tl.program_id(0), pairs * groups, tl.num_programs(0)):
        first, last, own, other = tiles_of_gradient(where, index // groups, FORM)
        if any_flag(saved.flags, own, other, first, last, parts, FORM) != 0:
            some = tl.arange(0, SOME)
            rows, others = some[:, None], some[None, :]
            for start in span(0, FORM.tile, SOME):
                total = tl.zeros([SOME, SOME], tl.float32)
                for step in span(first * parts, last * parts):
                    batch, tile, met = item_at(own, other, step // parts, FORM)
                    if flagged(saved.flags, batch, tile, step % parts):
                        columns = step % parts * WIDTH + tl.arange(0, WIDTH)
                        row = tile * FORM.tile + index % groups * SOME
                        _, by_bias_terms = load_weights(
                            saved,
                            inputs,
                            batch,
                            row,
                            met * FORM.tile + start,
                            columns,
                            FORM,
                            GATE,
                            SOME,
                        )
                        total += tl.sum(by_bias_terms, 2)
                batch, tile, met = item_at(own, other, first, FORM)
                row, column = tile * FORM.tile + index % groups * SOME, met * FORM.tile + start
                at = bias_pointer(by_bias, batch, row, column, rows, others, FORM)
                if FORM.shared:  # beyond the window nothing is read
                    near = rows + others >= 0
                else:
                    _, near = visible(where, row + rows, column + others, FORM)
                tl.store(at, tl.load(at, mask=near, other=0.0) + total, mask=near)
