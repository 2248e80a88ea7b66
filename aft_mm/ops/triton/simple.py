"""Causal AFT-simple, ``y_t = g(q_t) n_t / d_t`` with running sums n, d of e^k v and e^k.

A program walks along the channels of one sequence, a tile of `groups` · `rows` tokens at a time. A
thread sums the group before its own, a scan over the groups gives the sum that each group starts
from, and the thread then adds its own rows one by one.

The backward pass goes from the last tile to the first, recomputes each group from the saved sum,
and sums the gradients of the targets in reverse, relative to ``e^(−m_t)``, which only grows on the
way.

A tile may share one unit, the largest key up to its end: a token then costs one exponential. If in
some channel the largest key before the tile is more than 60 nats below it, each token has its own.

If there are too few programs for the device, a first kernel sums chunks of the sequences.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from ..checks import ENVIRONMENT_VARIABLE
from ..kernel_op import TOKENS, differentiated, register
from .availability import default_reasons
from .block_sizes import cdiv, count_processors, find_block
from .online_softmax import (
    HIGHEST,
    LOWEST,
    Floats,
    Ints,
    Place,
    Strided,
    Sum,
    Tensors,
    add_target,
    add_token,
    empty_sum,
    entry_pointer,
    exp,
    gated_mean,
    gradients_of_token,
    load_sum,
    merge,
    new_sums,
    new_wanted,
    store_row,
    store_sum,
    strided,
    target_of_token,
)

MOST_CHUNKS = tl.constexpr(64)
# A sum may be e^−60 of its unit; terms that float32 then loses are below e^−27 of it.
FARTHEST = tl.constexpr(60.0)
# A block [GROUPS, C], or a sum of such blocks, per row of the groups.
Rows: TypeAlias = tuple[Any, ...]


class ScanTile(NamedTuple):
    """units: whether the sums of a tile may share one unit, the largest key up to its end."""

    groups: int
    rows: int
    channels: int
    units: bool


class ScanSizes(NamedTuple):
    tokens: int
    channels: int
    tiles: int


@triton.jit
def locate_program(
    sizes: 'ScanSizes', BLOCK: tl.constexpr
) -> 'tuple[Ints, Ints, Ints, Ints, Ints]':
    """Return sequence, chunk and channels [1, C] of this program, and the tiles of the chunk."""
    blocks = tl.cdiv(sizes.channels, BLOCK.channels)
    batch, chunk = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = (tl.program_id(0) % blocks) * BLOCK.channels + tl.arange(0, BLOCK.channels)[None, :]
    first = chunk * sizes.tiles
    last = tl.minimum(first + sizes.tiles, tl.cdiv(sizes.tokens, BLOCK.groups * BLOCK.rows))
    return batch, chunk, channel, first, last


@triton.jit
def find_rows(
    sizes: 'ScanSizes', tile: 'Ints', channel: 'Ints', REVERSE: tl.constexpr, BLOCK: tl.constexpr
) -> 'tuple[Ints, Rows]':
    """Return the first token of each group [GROUPS, 1], and a tuple of masks, one per row."""
    ROWS: tl.constexpr = BLOCK.rows
    group = tl.arange(0, BLOCK.groups)[:, None]
    if REVERSE:
        group = BLOCK.groups - 1 - group
    token = (tile * BLOCK.groups + group) * ROWS
    real = ()
    for r in tl.static_range(ROWS):
        inside = (channel < sizes.channels) & (token + r < sizes.tokens)  # [GROUPS, C]
        real = real + (inside,)  # type: ignore[assignment]
    return token, real


@triton.jit
def load_rows(
    x: 'Strided | None', where: 'Place', real: 'Rows', ROWS: tl.constexpr, other: tl.constexpr
) -> 'Rows':
    rows = ()
    if x is None:
        rows = real
    else:
        at = entry_pointer(x, *where)
        for r in tl.static_range(ROWS):
            row = tl.load(at + r * x[2], mask=real[r], other=other)  # [GROUPS, C]
            rows = rows + (row,)  # type: ignore[assignment]
    return rows


@triton.jit
def load_tokens(
    inputs: 'Tensors', where: 'Place', real: 'Rows', ROWS: tl.constexpr
) -> 'tuple[Rows, Rows]':
    visible = real
    batch, token, channel = where
    if inputs.key_mask is not None:
        at = inputs.key_mask[0] + batch * inputs.key_mask[1] + token * inputs.key_mask[2]
        visible = ()
        for r in tl.static_range(ROWS):
            # [GROUPS, C]
            keep = tl.load(at + r * inputs.key_mask[2] + 0 * channel, mask=real[r], other=0)
            visible = visible + (real[r] & (keep != 0),)
    keys = load_rows(inputs.key, where, visible, ROWS, float('-inf'))
    return keys, load_rows(inputs.value, where, visible, ROWS, 0.0)


@triton.jit
def sum_rows(keys: 'Rows', values: 'Rows', KEY: tl.constexpr, ROWS: tl.constexpr) -> 'Sum':
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
            high, first, second = add_token((high, first, second), keys[r], values[r], KEY)
    return high, first, second


@triton.jit
def last_group(high: 'Floats', first: 'Floats', second: 'Floats', GROUPS: tl.constexpr) -> 'Sum':
    end = tl.arange(0, GROUPS)[:, None] == GROUPS - 1
    high = tl.max(tl.where(end, high, LOWEST), 0, keep_dims=True)
    first = tl.sum(tl.where(end, first, 0.0), 0, keep_dims=True)
    return high, first, tl.sum(tl.where(end, second, 0.0), 0, keep_dims=True)


@triton.jit
def follow(before: 'Sum', carry: 'Sum', BLOCK: tl.constexpr) -> 'tuple[Sum, Sum]':
    """Return the sum that each group starts from, and the next carry.

    `before` is the sum of the group before each one, `carry` precedes all.
    """
    high, first, second = before
    GROUPS: tl.constexpr = BLOCK.groups
    edge = tl.arange(0, GROUPS)[:, None] == 0
    joined = merge(*carry, high, first, second)
    high, first, second = tl.associative_scan(
        (
            tl.where(edge, joined[0], high),
            tl.where(edge, joined[1], first),
            tl.where(edge, joined[2], second),
        ),
        0,
        merge,
    )
    return (high, first, second), last_group(high, first, second, GROUPS)


@triton.jit
def sum_groups(high: 'Floats', first: 'Floats', second: 'Floats') -> 'Sum':
    """Merge the sums of all groups into one, [1, CHANNELS]."""
    top = tl.max(high, 0, keep_dims=True)
    scale = exp(high - top)
    first = tl.sum(first * scale, 0, keep_dims=True)
    return top, first, tl.sum(second * scale, 0, keep_dims=True)


@triton.jit
def load_chunks(
    sums: 'Strided | None',
    batch: 'Ints',
    chunk: 'Ints',
    channel: 'Ints',
    sizes: 'ScanSizes',
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> 'Sum':
    """Return the sum of the chunks before this one, or after it with REVERSE; empty without `sums`."""
    if sums is None:
        total = empty_sum(1, BLOCK.channels)
    else:
        chunks = tl.arange(0, MOST_CHUNKS)[:, None]
        real = (chunks > chunk) & (chunks < tl.num_programs(1)) if REVERSE else chunks < chunk
        real &= channel < sizes.channels
        parts = load_sum(sums, (batch, chunks, channel), real, LOWEST)  # [MOST_CHUNKS, C]
        total = sum_groups(*parts)
    return total


@triton.jit
def merge_pairs(
    m: 'Floats',
    n: 'Floats',
    d: 'Floats',
    bm: 'Floats',
    bn: 'Floats',
    bd: 'Floats',
    om: 'Floats',
    on: 'Floats',
    od: 'Floats',
    obm: 'Floats',
    obn: 'Floats',
    obd: 'Floats',
) -> 'tuple[Floats, ...]':
    bm, bn, bd = merge(m, n, d, obm, obn, obd)
    m, n, d = merge(m, n, d, om, on, od)
    return m, n, d, bm, bn, bd


@triton.jit
def precede(total: 'Sum', carry: 'Sum', BLOCK: tl.constexpr) -> 'tuple[Sum, Sum]':
    high, first, second = total
    edge = tl.arange(0, BLOCK.groups)[:, None] == 0
    zero = tl.zeros_like(high)
    joined = merge(*carry, high, first, second)
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
    carry = last_group(high, first, second, BLOCK.groups)
    return (before_high, before_first, before_second), carry


@triton.jit
def simple_forward_sums_kernel(
    sums: 'Strided', inputs: 'Tensors', sizes: 'ScanSizes', KEY: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Write the sum of each chunk into sums [3, B, chunks, D]."""
    batch, chunk, channel, tile, last = locate_program(sizes, BLOCK)
    total = empty_sum(BLOCK.groups, BLOCK.channels)
    while tile < last:
        token, real = find_rows(sizes, tile, channel, False, BLOCK)
        keys, values = load_tokens(inputs, (batch, token, channel), real, BLOCK.rows)
        group_sum = sum_rows(keys, values, KEY, BLOCK.rows)
        total = merge(*total, *group_sum)
        tile += 1
    where = batch, chunk, channel
    store_sum(sums, where, channel < sizes.channels, sum_groups(*total))


@triton.jit
def unit_of_tile(keys: 'Rows', high: 'Floats', ROWS: tl.constexpr) -> 'Floats':
    """Return the largest of `high` and the keys, [1, C]."""
    highest = keys[0].to(tl.float32)
    for r in tl.static_range(1, ROWS):
        highest = tl.maximum(highest, keys[r].to(tl.float32))
    return tl.maximum(high, tl.max(highest, 0, keep_dims=True))


@triton.jit
def add_pairs(
    n: 'Floats',
    d: 'Floats',
    bn: 'Floats',
    bd: 'Floats',
    on: 'Floats',
    od: 'Floats',
    obn: 'Floats',
    obd: 'Floats',
) -> 'tuple[Floats, ...]':
    """:func:`merge_pairs` for sums with the same unit."""
    return n + on, d + od, n + obn, d + obd


@triton.jit
def sum_tile(
    keys: 'Rows', values: 'Rows', unit: 'Floats', carry: 'Sum', BLOCK: tl.constexpr
) -> 'tuple[Sum, Rows, Sum]':
    """Return the sums before each group, E of each row and the next carry, relative to one unit."""
    ROWS: tl.constexpr = BLOCK.rows
    group = tl.arange(0, BLOCK.groups)[:, None]
    scale = exp(carry[0] - unit)
    before_first = tl.where(group == 0, carry[1] * scale, 0.0)
    before_second = tl.where(group == 0, carry[2] * scale, 0.0)
    first, second, weights = before_first, before_second, ()
    for r in tl.static_range(ROWS):
        weight = exp(keys[r].to(tl.float32) - unit)  # [GROUPS, C]
        first += weight * values[r].to(tl.float32)
        second += weight
        weights = weights + (weight,)  # type: ignore[assignment]
    first, second, before_first, before_second = tl.associative_scan(
        (first, second, before_first, before_second), 0, add_pairs
    )
    end = group == BLOCK.groups - 1
    first = tl.sum(tl.where(end, first, 0.0), 0, keep_dims=True)
    carry = unit, first, tl.sum(tl.where(end, second, 0.0), 0, keep_dims=True)
    return (unit, before_first, before_second), weights, carry


@triton.jit
def finish_rows(
    output: 'Strided',
    saved: 'Strided | None',
    where: 'Place',
    real: 'Rows',
    tokens: 'tuple[Rows, Rows, Rows]',
    before: 'Sum',
    weights: 'Rows | None',
    KEY: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the sums before the groups, and the outputs of their rows.

    weights: E of each row, if all sums have one unit.
    """
    ROWS: tl.constexpr = BLOCK.rows
    batch, token, channel = where
    queries, keys, values = tokens
    high, first, second = before
    store_sum(saved, (batch, token // ROWS, channel), real[0], before)
    at = entry_pointer(output, *where)
    for r in tl.static_range(ROWS):
        if weights is None:
            high, first, second = add_token((high, first, second), keys[r], values[r], KEY)
        else:
            first += weights[r] * values[r].to(tl.float32)
            second += weights[r]
        mixed = gated_mean(queries[r], (high, first, second), KEY, GATE, BLOCK.units)
        store_row(output, at, r, real[r], mixed)


@triton.jit
def simple_forward_kernel(
    output: 'Strided',
    saved: 'Strided | None',
    starts: 'Strided | None',
    inputs: 'Tensors',
    sizes: 'ScanSizes',
    KEY: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the output and, unless `saved` is None, the sum before each group [3, B, groups, D].

    `starts` holds the sums of the chunks, None for a single chunk.
    """
    ROWS: tl.constexpr = BLOCK.rows
    batch, chunk, channel, tile, last = locate_program(sizes, BLOCK)
    carry = load_chunks(starts, batch, chunk, channel, sizes, False, BLOCK)
    start = tile * (BLOCK.groups * ROWS)
    while tile < last:
        token, real = find_rows(sizes, tile, channel, False, BLOCK)
        where = batch, token, channel
        if BLOCK.units:
            keys, values = load_tokens(inputs, where, real, ROWS)
            tokens = load_rows(inputs.query, where, real, ROWS, 0.0), keys, values
            unit = unit_of_tile(keys, carry[0], ROWS)
            if tl.min(tl.min(carry[0] - unit, 1), 0) >= -FARTHEST:
                group_starts, weights, carry = sum_tile(keys, values, unit, carry, BLOCK)
                finish_rows(
                    output, saved, where, real, tokens, group_starts, weights, KEY, GATE, BLOCK
                )
            else:
                before, carry = precede(sum_rows(keys, values, KEY, ROWS), carry, BLOCK)
                finish_rows(output, saved, where, real, tokens, before, None, KEY, GATE, BLOCK)
        else:
            earlier = ()
            for _r in tl.static_range(ROWS):
                earlier = earlier + (real[0] & (token > start),)  # type: ignore[assignment]
            keys, values = load_tokens(inputs, (batch, token - ROWS, channel), earlier, ROWS)
            group_sum = sum_rows(keys, values, KEY, ROWS)
            keys, values = load_tokens(inputs, where, real, ROWS)
            tokens = load_rows(inputs.query, where, real, ROWS, 0.0), keys, values
            before, carry = follow(group_sum, carry, BLOCK)
            finish_rows(output, saved, where, real, tokens, before, None, KEY, GATE, BLOCK)
        tile += 1


@triton.jit
def find_targets(
    results: 'Tensors',
    saved: 'Strided',
    inputs: 'Tensors',
    where: 'Place',
    real: 'Rows',
    KEY: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> 'tuple[Rows, Rows, Rows]':
    ROWS: tl.constexpr = BLOCK.rows
    batch, token, channel = where
    keys, values = load_tokens(inputs, where, real, ROWS)
    queries = load_rows(inputs.query, where, real, ROWS, 0.0)
    gradients = load_rows(inputs.gradient, where, real, ROWS, 0.0)
    # Past the last token the target is an empty sum.
    before = load_sum(saved, (batch, token // ROWS, channel), real[0], HIGHEST)  # [GROUPS, C]
    at = entry_pointer(results.query, *where)
    targets = ()
    for r in tl.static_range(ROWS):
        before = add_token(before, keys[r], values[r], KEY)
        grad_query, target = target_of_token(
            gradients[r], queries[r], before, KEY, GATE, BLOCK.units
        )
        store_row(results.query, at, r, real[r], grad_query)
        targets = targets + (target,)  # type: ignore[assignment]
    return keys, values, targets


@triton.jit
def sum_targets(targets: 'Rows', BLOCK: tl.constexpr) -> 'Sum':
    total = empty_sum(BLOCK.groups, BLOCK.channels)
    for r in tl.static_range(BLOCK.rows - 1, -1, -1):
        total = add_target(total, targets[r])
    return total


@triton.jit
def simple_backward_sums_kernel(
    sums: 'Strided',
    results: 'Tensors',
    saved: 'Strided',
    inputs: 'Tensors',
    sizes: 'ScanSizes',
    KEY: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the sum of the targets of each chunk into sums [3, B, chunks, D]."""
    batch, chunk, channel, tile, last = locate_program(sizes, BLOCK)
    total = empty_sum(BLOCK.groups, BLOCK.channels)
    while tile < last:
        token, real = find_rows(sizes, tile, channel, True, BLOCK)
        _, _, targets = find_targets(
            results, saved, inputs, (batch, token, channel), real, KEY, GATE, BLOCK
        )
        group_sum = sum_targets(targets, BLOCK)
        total = merge(*total, *group_sum)
        tile += 1
    where = batch, chunk, channel
    store_sum(sums, where, channel < sizes.channels, sum_groups(*total))


@triton.jit
def simple_backward_kernel(
    results: 'Tensors',
    saved: 'Strided',
    ends: 'Strided | None',
    inputs: 'Tensors',
    sizes: 'ScanSizes',
    KEY: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write those gradients of query, key and value whose result is not None.

    `ends` holds the sums of the targets of the chunks, None for a single chunk.
    """
    ROWS: tl.constexpr = BLOCK.rows
    batch, chunk, channel, start, last = locate_program(sizes, BLOCK)
    carry = load_chunks(ends, batch, chunk, channel, sizes, True, BLOCK)
    tile = last - 1
    while tile >= start:
        token, real = find_rows(sizes, tile, channel, True, BLOCK)
        where = batch, token, channel
        keys, values, targets = find_targets(results, saved, inputs, where, real, KEY, GATE, BLOCK)
        later, carry = precede(sum_targets(targets, BLOCK), carry, BLOCK)
        key_at = entry_pointer(results.key, *where)
        value_at = entry_pointer(results.value, *where)
        for r in tl.static_range(ROWS - 1, -1, -1):
            later = add_target(later, targets[r])
            grad_key, grad_value = gradients_of_token(keys[r], values[r], later, KEY)
            store_row(results.key, key_at, r, real[r], grad_key)
            store_row(results.value, value_at, r, real[r], grad_value)
        tile -= 1


# Shorter chunks cost more than they save.
SHORTEST_CHUNK = 256


def plan_chunks(value: Tensor) -> tuple[int, int, int, int]:
    """Divide sequences into chunks if whole sequences would occupy less than half of the device.

    Returns:
        Tokens per chunk, chunks per sequence, channels per program and programs per chunk.
    """
    batch, tokens, channels = value.shape
    processors = count_processors(value.device)
    tile = find_block('scan', value.device)
    width = tile.row_bytes // value.itemsize
    if batch * cdiv(channels, width) < 2 * processors:
        width //= 2
    programs = batch * cdiv(channels, width)
    chunks = 1
    if 2 * programs < processors:
        chunks = min(2 * processors // programs, tokens // SHORTEST_CHUNK, MOST_CHUNKS.value)
    rows = tile.groups * tile.rows
    chunk = cdiv(cdiv(tokens, max(chunks, 1)), rows) * rows
    return chunk, cdiv(tokens, chunk), width, programs


def _launch_settings(
    kernel: str, value: Tensor, units: bool
) -> tuple[tuple[int, int], ScanSizes, dict[str, Any]]:
    chunk, chunks, width, programs = plan_chunks(value)
    block = find_block(kernel, value.device)
    _, tokens, channels = value.shape
    sizes = ScanSizes(tokens, channels, chunk // (block.groups * block.rows))
    tile = ScanTile(block.groups, block.rows, width, units)
    return (programs, chunks), sizes, dict(BLOCK=tile, num_warps=block.warps)


def new_results(value: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    groups = cdiv(value.shape[1], find_block('scan', value.device).rows)
    return value.new_empty(value.shape), new_sums(value, groups if save else 0)


def causal_simple(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    key_function: str,
    gate: str,
    units: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Return causal AFT-simple [B, T, D], and with `save` the sum before each group."""
    output, saved = new_results(value, save)
    inputs = Tensors(strided(query), strided(key), strided(value), strided(key_mask))
    grid, sizes, options = _launch_settings('scan', value, units)
    starts, kept = None, strided(saved) if save else None
    if grid[1] > 1:
        starts = strided(new_sums(value, grid[1]))
        simple_forward_sums_kernel[grid](starts, inputs, sizes, KEY=key_function, **options)
    options.update(KEY=key_function, GATE=gate)
    simple_forward_kernel[grid](strided(output), kept, starts, inputs, sizes, **options)
    return output, saved


def causal_simple_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    key_function: str,
    gate: str,
    units: bool,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    results = new_wanted((query, key, value), wanted)
    tensors = strided(query), strided(key), strided(value), strided(key_mask)
    inputs = Tensors(*tensors, strided(gradient))
    grid, sizes, options = _launch_settings('scan_backward', value, units)
    options.update(KEY=key_function, GATE=gate)
    grad_query, grad_key, grad_value = map(strided, results)
    ends, kept, written = None, strided(saved), Tensors(grad_query, grad_key, grad_value)
    if grid[1] > 1:
        ends = strided(new_sums(value, grid[1]))
        simple_backward_sums_kernel[grid](ends, Tensors(), kept, inputs, sizes, **options)
    simple_backward_kernel[grid](written, kept, ends, inputs, sizes, **options)
    return results


simple_op = register(
    causal_simple,
    f'{TOKENS}, Tensor? key_mask, str key_function, str gate, bool units',
    causal_simple_backward,
    fake=lambda *inputs: new_results(inputs[2], inputs[-1]),
    public_name='aft_simple',
)


def may_share_units(value: Tensor) -> bool:
    """Return whether the kernel with units of tiles is used: where verified, or on request."""
    if 'triton' in os.environ.get(ENVIRONMENT_VARIABLE, ''):
        return True
    where = value.dtype, value.device.type, value.device.index
    return not default_reasons('aft_simple_units', *where)


def aft_simple(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    key_function: str,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute causal AFT-simple in O(T·D) with running sums."""
    save = differentiated(query, key, value)
    units = key_function == 'softmax' and may_share_units(value)
    return simple_op(query, key, value, key_mask, key_function, gate, units, save)[0]
