"""Flagged tiles once more, term by term: exact for every finite key and bias.

Each row and channel has a unit of its own, the largest key that it sees, and the sum of
``exp((k − unit) + (w − shift))`` is taken over its largest term. Differences stand in brackets, so
that keys of ±1e4 lose nothing. Always launched, on as many programs as the device holds, which look
at the flags and return; what they redo takes as many exponentials as there are pairs. SOME targets
and SOME sources are weighed at once, for the channels of a block.
"""

import triton
import triton.language as tl

from .bias import bias_pointer, load_bias, span, tokens_at, visible
from .product import TINY, pair_of_tiles, store_output
from .rows import LOWEST
from .terms import UNSEEN, load_gradient, load_keys


@triton.jit
def flagged(flags, batch, tile, part):
    """Whether this tile must be done once more."""
    at = flags.at + batch * flags.batch + tile * flags.token + part
    return tl.load(at) != 0


@triton.jit
def load_pairs(
    key,
    key_mask,
    bias,
    shifts,
    where,
    batch,
    row,
    other,
    columns,
    channels,
    FORM: tl.constexpr,
    SOME: tl.constexpr,
):
    """Keys [SOME, C], w − shift of targets and sources, and which of keys and pairs are seen."""
    some = tl.arange(0, SOME)
    rows, others = row + some, other + some
    real = (others < where.sources)[:, None] & (columns < channels)[None, :]
    keys, shown = load_keys(key, key_mask, batch, others, columns, real, where.sources)
    w, seen, _ = load_bias(bias, where, row, other, some[:, None], some[None, :], FORM)
    shift = tl.load(shifts + rows, mask=rows < where.targets, other=0.0)
    return keys, w - shift[:, None], shown, seen[:, :, None] & shown[None, :, :]


@triton.jit
def exact_rows(
    source,
    bias,
    shifts,
    where,
    batch,
    row,
    columns,
    channels,
    last,
    FORM: tl.constexpr,
    SOME: tl.constexpr,
):
    """Mean, λ and its unit of SOME rows [SOME, C], over the sources before `last`."""
    zero = tl.zeros([SOME, columns.shape[0]], tl.float32)
    unit = zero + LOWEST
    for start in span(0, last, SOME):
        keys, _, _, seen = load_pairs(
            source[0],
            source[2],
            bias,
            shifts,
            where,
            batch,
            row,
            start,
            columns,
            channels,
            FORM,
            SOME,
        )
        unit = tl.maximum(unit, tl.max(tl.where(seen, keys[None, :, :], LOWEST), 1))
    high, numerator, denominator = zero + LOWEST, zero, zero
    for start in span(0, last, SOME):
        others = start + tl.arange(0, SOME)
        keys, w, shown, seen = load_pairs(
            source[0],
            source[2],
            bias,
            shifts,
            where,
            batch,
            row,
            start,
            columns,
            channels,
            FORM,
            SOME,
        )
        values = tl.load(tokens_at(source[1], batch, others, columns), mask=shown, other=0.0)
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
    query,
    source,
    bias,
    shifts,
    where,
    channels,
    batches,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    SOME: tl.constexpr,
):
    """The forward pass; source: key, value and key_mask."""
    parts = tl.cdiv(channels, WIDTH)
    groups = tl.cdiv(where.targets, SOME)
    for index in span(tl.program_id(0), groups * batches * parts, tl.num_programs(0)):
        part = index % parts
        group = index // parts % groups
        batch = (index // parts // groups).to(tl.int64)
        if flagged(result.flags, batch, group * SOME // FORM.tile, part):
            rows = group * SOME + tl.arange(0, SOME)
            columns = part * WIDTH + tl.arange(0, WIDTH)
            real = (rows < where.targets)[:, None] & (columns < channels)[None, :]
            last = where.sources
            if FORM.causal:
                last = tl.minimum(group * SOME + SOME, where.sources)
            mean, log, unit = exact_rows(
                source,
                bias,
                shifts,
                where,
                batch,
                group * SOME,
                columns,
                channels,
                last,
                FORM,
                SOME,
            )
            if result.mean is not None:
                tl.store(tokens_at(result.mean, batch, rows, columns), mean, mask=real)
                tl.store(tokens_at(result.log, batch, rows, columns), log, mask=real)
                tl.store(tokens_at(result.unit, batch, rows, columns), unit, mask=real)
            store_output(result, query, mean, batch, rows, columns, real, GATE)


@triton.jit
def load_weights(
    result,
    query,
    source,
    bias,
    shifts,
    where,
    batch,
    row,
    other,
    columns,
    channels,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    SOME: tl.constexpr,
):
    """Of SOME targets and sources ``p = W e^k / d`` times α, and times ``α (v − o) + β``."""
    rows, others = row + tl.arange(0, SOME), other + tl.arange(0, SOME)
    keys, w, shown, seen = load_pairs(
        source[0], source[2], bias, shifts, where, batch, row, other, columns, channels, FORM, SOME
    )
    values = tl.load(tokens_at(source[1], batch, others, columns), mask=shown, other=0.0)
    real = (rows < where.targets)[:, None] & (columns < channels)[None, :]
    mean = tl.load(tokens_at(result.mean, batch, rows, columns), mask=real, other=0.0)
    log = tl.load(tokens_at(result.log, batch, rows, columns), mask=real, other=UNSEEN)
    unit = tl.load(tokens_at(result.unit, batch, rows, columns), mask=real, other=0.0)
    by_mean, by_log = load_gradient(result, query, batch, rows, columns, real, GATE)
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
    result,
    query,
    source,
    bias,
    shifts,
    where,
    channels,
    batches,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    SOME: tl.constexpr,
):
    """What flagged tiles add to the gradients of key and value."""
    parts = tl.cdiv(channels, WIDTH)
    groups = tl.cdiv(where.sources, SOME)
    tiles = tl.cdiv(where.targets, FORM.tile)
    for index in span(tl.program_id(0), groups * batches * parts, tl.num_programs(0)):
        part = index % parts
        group = index // parts % groups
        batch = (index // parts // groups).to(tl.int64)
        others = group * SOME + tl.arange(0, SOME)
        columns = part * WIDTH + tl.arange(0, WIDTH)
        real = (others < where.sources)[:, None] & (columns < channels)[None, :]
        first = 0
        if FORM.causal:
            first = group * SOME // FORM.tile
        key_total = tl.zeros([SOME, WIDTH], tl.float32)
        value_total = tl.zeros([SOME, WIDTH], tl.float32)
        found = 0
        for tile in span(first, tiles):
            if flagged(result.flags, batch, tile, part):
                found = 1
                last = tl.minimum((tile + 1) * FORM.tile, where.targets)
                for start in span(tile * FORM.tile, last, SOME):
                    values, keys = load_weights(
                        result,
                        query,
                        source,
                        bias,
                        shifts,
                        where,
                        batch,
                        start,
                        group * SOME,
                        columns,
                        channels,
                        FORM,
                        GATE,
                        SOME,
                    )
                    value_total += tl.sum(values, 0)
                    key_total += tl.sum(keys, 0)
        if found != 0:
            add_to(by_key, batch, others, columns, real, key_total)
            add_to(by_value, batch, others, columns, real, value_total)


@triton.jit
def any_flag(flags, tile, batches, parts):
    """How many flags there are for this tile, of all sequences and channels."""
    count = 0
    for batch in span(0, batches):
        for start in span(0, parts, 32):
            part = start + tl.arange(0, 32)
            at = flags.at + batch * flags.batch + tile * flags.token + part
            count += tl.sum(tl.load(at, mask=part < parts, other=0).to(tl.int32), 0)
    return count


@triton.jit
def fix_bias(
    by_bias,
    result,
    query,
    source,
    bias,
    shifts,
    where,
    channels,
    batches,
    pairs,
    FORM: tl.constexpr,
    GATE: tl.constexpr,
    WIDTH: tl.constexpr,
    SOME: tl.constexpr,
):
    """What flagged tiles add to the gradient of w."""
    parts = tl.cdiv(channels, WIDTH)
    groups = FORM.tile // SOME
    for index in span(tl.program_id(0), pairs * groups, tl.num_programs(0)):
        tile, other, exists = pair_of_tiles(where, index // groups, FORM)
        row = tile * FORM.tile + index % groups * SOME
        if exists & (any_flag(result.flags, tile, batches, parts) != 0):
            last = tl.minimum((other + 1) * FORM.tile, where.sources)
            for start in span(other * FORM.tile, last, SOME):
                total = tl.zeros([SOME, SOME], tl.float32)
                for step in span(0, batches * parts):
                    batch = (step // parts).to(tl.int64)
                    if flagged(result.flags, batch, tile, step % parts):
                        columns = step % parts * WIDTH + tl.arange(0, WIDTH)
                        _, by_bias_terms = load_weights(
                            result,
                            query,
                            source,
                            bias,
                            shifts,
                            where,
                            batch,
                            row,
                            start,
                            columns,
                            channels,
                            FORM,
                            GATE,
                            SOME,
                        )
                        total += tl.sum(by_bias_terms, 2)
                some = tl.arange(0, SOME)
                rows, others = some[:, None], some[None, :]
                _, near = visible(where, row + rows, start + others, FORM)
                at = bias_pointer(by_bias, row, start, rows, others, FORM)
                tl.store(at, tl.load(at, mask=near, other=0.0) + total, mask=near)
