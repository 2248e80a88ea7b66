"""AFT-simple, causal: ``y_t = g(q_t) n_t / d_t`` with running sums n, d of e^k v, e^k, in one pass.

A program walks along one sequence, a tile at a time: `groups` times `rows` tokens of its channels.
The rows of a group lie in one thread. It sums those of the group before its own, a scan over the
groups says what each starts from, and it walks along its own rows with all that came before them.
So a tile is loaded twice, the second time from the cache, and memory is read once. Nothing but the
output is written; to save for the gradient, the sum before each group. Sums are those of `rows.py`,
exact for any finite key, and so also of relu and relu2 keys.

The backward pass goes from the last tile to the first, reruns each group from what was saved, and
sums the gradients of the targets the other way round: over ``e^(−m_t)``, which only grows on the
way.

Where batch and channels give too few programs for the device, a sequence is cut into chunks, and a
kernel before that sums each of them: inputs are then read twice. A program adds the sums of the
chunks before its own, at most MOST_CHUNKS.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .rows import (
    HIGHEST,
    LOWEST,
    add_target,
    add_token,
    empty_sum,
    exp,
    gated_mean,
    gradients_of_token,
    load_row,
    load_sum,
    merge,
    place_in,
    store_row,
    store_sum,
    target_of_token,
)

# What a program sums at once.
MOST_CHUNKS = tl.constexpr(64)


class Block(NamedTuple):
    """Groups, rows of a group and channels of a tile."""

    groups: int
    rows: int
    channels: int


class Sizes(NamedTuple):
    """Numbers of tokens, of channels, and of tokens and tiles of a chunk."""

    tokens: int
    channels: int
    chunk: int
    tiles: int


@triton.jit
def place(sizes, CHANNELS: tl.constexpr):
    """The sequence and the chunk of this program, its channels [1, CHANNELS], and which exist."""
    blocks = tl.cdiv(sizes.channels, CHANNELS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    channel = (tl.program_id(0) % blocks) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    return batch, tl.program_id(1).to(tl.int64), channel, channel < sizes.channels


@triton.jit
def find_rows(sizes, tile, channel, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """The first token of each group [GROUPS, 1], and which numbers of its rows exist, a tuple."""
    ROWS: tl.constexpr = BLOCK.rows
    group = tl.arange(0, BLOCK.groups)[:, None]
    if REVERSE:
        group = BLOCK.groups - 1 - group
    token = (tile * BLOCK.groups + group) * ROWS
    real = ()
    for r in tl.static_range(ROWS):
        real = real + ((channel < sizes.channels) & (token + r < sizes.tokens),)
    return token, real


@triton.jit
def load_rows(x, batch, token, channel, real, ROWS: tl.constexpr, other: tl.constexpr):
    """Rows of x, a tuple; of None as many that are not used."""
    rows = ()
    if x is None:
        rows = real
    else:
        at = place_in(x, batch, token, channel)
        for r in tl.static_range(ROWS):
            rows = rows + (load_row(x, at, r, real[r], other),)
    return rows


@triton.jit
def load_tokens(inputs, batch, token, channel, real, ROWS: tl.constexpr):
    """Rows of keys and of values, −inf and 0 where there is none or it is hidden."""
    seen = real
    if inputs.key_mask is not None:
        at = inputs.key_mask[0] + batch * inputs.key_mask[1] + token * inputs.key_mask[2]
        seen = ()
        for r in tl.static_range(ROWS):
            keep = tl.load(at + r * inputs.key_mask[2] + 0 * channel, mask=real[r], other=0)
            seen = seen + (real[r] & (keep != 0),)
    keys = load_rows(inputs.key, batch, token, channel, seen, ROWS, float('-inf'))
    return keys, load_rows(inputs.value, batch, token, channel, seen, ROWS, 0.0)


@triton.jit
def sum_rows(keys, values, KEY: tl.constexpr, ROWS: tl.constexpr):
    """The sum of the rows of each group."""
    if KEY == 'softmax':
        high = keys[0].to(tl.float32)
        for r in tl.static_range(1, ROWS):
            high = tl.maximum(high, keys[r].to(tl.float32))
        high = tl.maximum(high, LOWEST)
        first, second = tl.zeros_like(high), tl.zeros_like(high)
        for r in tl.static_range(ROWS):
            weight = exp(keys[r].to(tl.float32) - high)
            first += weight * values[r].to(tl.float32)
            second += weight
    else:
        high = tl.zeros_like(keys[0].to(tl.float32))
        first, second = high, high
        for r in tl.static_range(ROWS):
            high, first, second = add_token(high, first, second, keys[r], values[r], KEY)
    return high, first, second


@triton.jit
def follow(high, first, second, carry, BLOCK: tl.constexpr):
    """What each group starts from, of the sums of the groups before each and a carry before all."""
    GROUPS: tl.constexpr = BLOCK.groups
    edge = tl.arange(0, GROUPS)[:, None] == 0
    joined = merge(carry[0], carry[1], carry[2], high, first, second)
    high, first, second = tl.associative_scan(
        (
            tl.where(edge, joined[0], high),
            tl.where(edge, joined[1], first),
            tl.where(edge, joined[2], second),
        ),
        0,
        merge,
    )
    end = tl.arange(0, GROUPS)[:, None] == GROUPS - 1
    carry = (
        tl.max(tl.where(end, high, LOWEST), 0, keep_dims=True),
        tl.sum(tl.where(end, first, 0.0), 0, keep_dims=True),
        tl.sum(tl.where(end, second, 0.0), 0, keep_dims=True),
    )
    return (high, first, second), carry


@triton.jit
def total(high, first, second):
    """One sum [1, CHANNELS] of those of all groups."""
    top = tl.max(high, 0, keep_dims=True)
    scale = exp(high - top)
    first = tl.sum(first * scale, 0, keep_dims=True)
    return top, first, tl.sum(second * scale, 0, keep_dims=True)


@triton.jit
def load_chunks(sums, batch, chunk, channel, inside, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the chunks before this one, or after it if REVERSE; of none if `sums` is None."""
    if sums is None:
        found = empty_sum(1, BLOCK.channels)
    else:
        chunks = tl.arange(0, MOST_CHUNKS)[:, None]
        real = (chunks > chunk) & (chunks < tl.num_programs(1)) if REVERSE else chunks < chunk
        high, first, second = load_sum(sums, batch, chunks, channel, inside & real, LOWEST)
        found = total(high, first, second)
    return found


@triton.jit
def merge_pairs(m, n, d, bm, bn, bd, om, on, od, obm, obn, obd):
    """Of two neighbours the sum of both, and of all but the last group of the second."""
    bm, bn, bd = merge(m, n, d, obm, obn, obd)
    m, n, d = merge(m, n, d, om, on, od)
    return m, n, d, bm, bn, bd


@triton.jit
def precede(high, first, second, carry, BLOCK: tl.constexpr):
    """The sums of the groups before each and of a carry before all, and those of all."""
    edge = tl.arange(0, BLOCK.groups)[:, None] == 0
    zero = tl.zeros_like(high)
    joined = merge(carry[0], carry[1], carry[2], high, first, second)
    high, first, second, before_high, before_first, before_second = tl.associative_scan(
        (
            tl.where(edge, joined[0], high),
            tl.where(edge, joined[1], first),
            tl.where(edge, joined[2], second),
            tl.where(edge, carry[0], zero + LOWEST),
            tl.where(edge, carry[1], zero),
            tl.where(edge, carry[2], zero),
        ),
        0,
        merge_pairs,
    )
    end = tl.arange(0, BLOCK.groups)[:, None] == BLOCK.groups - 1
    carry = (
        tl.max(tl.where(end, high, LOWEST), 0, keep_dims=True),
        tl.sum(tl.where(end, first, 0.0), 0, keep_dims=True),
        tl.sum(tl.where(end, second, 0.0), 0, keep_dims=True),
    )
    return (before_high, before_first, before_second), carry


@triton.jit
def chunk_sums(sums, inputs, sizes, KEY: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of each chunk into sums [3, B, chunks, D]."""
    batch, chunk, channel, inside = place(sizes, BLOCK.channels)
    high, first, second = empty_sum(BLOCK.groups, BLOCK.channels)
    tile = chunk * sizes.tiles
    last = tl.minimum(tile + sizes.tiles, tl.cdiv(sizes.tokens, BLOCK.groups * BLOCK.rows))
    while tile < last:
        token, real = find_rows(sizes, tile, channel, False, BLOCK)
        keys, values = load_tokens(inputs, batch, token, channel, real, BLOCK.rows)
        own = sum_rows(keys, values, KEY, BLOCK.rows)
        high, first, second = merge(high, first, second, own[0], own[1], own[2])
        tile += 1
    high, first, second = total(high, first, second)
    store_sum(sums, batch, chunk, channel, inside, high, first, second)


@triton.jit
def forward(
    output, saved, starts, inputs, sizes, KEY: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr
):
    """Output, and the sum before each group into saved [3, B, groups, D] unless that is None.

    `starts` has the sums of the chunks, None for a single one.
    """
    ROWS: tl.constexpr = BLOCK.rows
    batch, chunk, channel, inside = place(sizes, BLOCK.channels)
    high, first, second = load_chunks(starts, batch, chunk, channel, inside, False, BLOCK)
    tile = chunk * sizes.tiles
    last = tl.minimum(tile + sizes.tiles, tl.cdiv(sizes.tokens, BLOCK.groups * ROWS))
    while tile < last:
        token, real = find_rows(sizes, tile, channel, False, BLOCK)
        earlier = ()
        for _r in tl.static_range(ROWS):
            earlier = earlier + (real[0] & (token > chunk * sizes.chunk),)
        keys, values = load_tokens(inputs, batch, token - ROWS, channel, earlier, ROWS)
        own = sum_rows(keys, values, KEY, ROWS)
        keys, values = load_tokens(inputs, batch, token, channel, real, ROWS)
        queries = load_rows(inputs.query, batch, token, channel, real, ROWS, 0.0)
        before, carry = follow(own[0], own[1], own[2], (high, first, second), BLOCK)
        store_sum(saved, batch, token // ROWS, channel, real[0], before[0], before[1], before[2])
        high, first, second = carry
        at = place_in(output, batch, token, channel)
        for r in tl.static_range(ROWS):
            before = add_token(before[0], before[1], before[2], keys[r], values[r], KEY)
            mixed = gated_mean(queries[r], before[1], before[2], KEY, GATE)
            store_row(output, at, r, real[r], mixed)
        tile += 1


@triton.jit
def find_targets(
    results, saved, inputs, where, real, KEY: tl.constexpr, GATE: tl.constexpr, ROWS: tl.constexpr
):
    """Keys, values and the sum that each row is to its keys; writes the gradients of queries."""
    batch, token, channel = where
    keys, values = load_tokens(inputs, batch, token, channel, real, ROWS)
    queries = load_rows(inputs.query, batch, token, channel, real, ROWS, 0.0)
    gradients = load_rows(inputs.gradient, batch, token, channel, real, ROWS, 0.0)
    # Past the last token a target is nothing, over −HIGHEST.
    before = load_sum(saved, batch, token // ROWS, channel, real[0], HIGHEST)
    at = place_in(results.query, batch, token, channel)
    targets = ()
    for r in tl.static_range(ROWS):
        before = add_token(before[0], before[1], before[2], keys[r], values[r], KEY)
        by_query, high, first, second = target_of_token(
            gradients[r], queries[r], before[0], before[1], before[2], KEY, GATE
        )
        store_row(results.query, at, r, real[r], by_query)
        targets = targets + ((high, first, second),)
    return keys, values, targets


@triton.jit
def sum_targets(high, first, second, targets, ROWS: tl.constexpr):
    """The sum with the targets of all rows, which come before it."""
    for r in tl.static_range(ROWS - 1, -1, -1):
        high, first, second = add_target(
            high, first, second, targets[r][0], targets[r][1], targets[r][2]
        )
    return high, first, second


@triton.jit
def backward_chunk_sums(
    sums, results, saved, inputs, sizes, KEY: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum of the targets of each chunk into sums [3, B, chunks, D]."""
    batch, chunk, channel, inside = place(sizes, BLOCK.channels)
    high, first, second = empty_sum(BLOCK.groups, BLOCK.channels)
    tile = chunk * sizes.tiles
    last = tl.minimum(tile + sizes.tiles, tl.cdiv(sizes.tokens, BLOCK.groups * BLOCK.rows))
    while tile < last:
        token, real = find_rows(sizes, tile, channel, True, BLOCK)
        _, _, targets = find_targets(
            results, saved, inputs, (batch, token, channel), real, KEY, GATE, BLOCK.rows
        )
        own = empty_sum(BLOCK.groups, BLOCK.channels)
        own = sum_targets(own[0], own[1], own[2], targets, BLOCK.rows)
        high, first, second = merge(high, first, second, own[0], own[1], own[2])
        tile += 1
    high, first, second = total(high, first, second)
    store_sum(sums, batch, chunk, channel, inside, high, first, second)


@triton.jit
def backward(
    results, saved, ends, inputs, sizes, KEY: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr
):
    """The gradients of query, key and value, of each that is not None.

    `ends` has the sums of the targets of the chunks, None for a single one.
    """
    ROWS: tl.constexpr = BLOCK.rows
    batch, chunk, channel, inside = place(sizes, BLOCK.channels)
    high, first, second = load_chunks(ends, batch, chunk, channel, inside, True, BLOCK)
    start = chunk * sizes.tiles
    tile = tl.minimum(start + sizes.tiles, tl.cdiv(sizes.tokens, BLOCK.groups * ROWS)) - 1
    while tile >= start:
        token, real = find_rows(sizes, tile, channel, True, BLOCK)
        keys, values, targets = find_targets(
            results, saved, inputs, (batch, token, channel), real, KEY, GATE, ROWS
        )
        own = empty_sum(BLOCK.groups, BLOCK.channels)
        own = sum_targets(own[0], own[1], own[2], targets, ROWS)
        later, carry = precede(own[0], own[1], own[2], (high, first, second), BLOCK)
        high, first, second = carry
        key_at = place_in(results.key, batch, token, channel)
        value_at = place_in(results.value, batch, token, channel)
        for r in tl.static_range(ROWS - 1, -1, -1):
            later = add_target(
                later[0], later[1], later[2], targets[r][0], targets[r][1], targets[r][2]
            )
            by_key, by_value = gradients_of_token(
                keys[r], values[r], later[0], later[1], later[2], KEY
            )
            store_row(results.key, key_at, r, real[r], by_key)
            store_row(results.value, value_at, r, real[r], by_value)
        tile -= 1
