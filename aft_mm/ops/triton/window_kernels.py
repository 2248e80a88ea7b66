"""Kernels of AFTLocalHard: ``y_t = g(q_t) n_t / d_t``, n and d the sums of e^k v and e^k in a window.

A window is an interval along each axis of the grid, and sums over an interval of `window` places
come from blocks of as many (van Herk): what lies in it is the end of one block and the beginning of
the next. A first kernel writes the sums from each place to the end of its block, a second walks
along the block, sums from its beginning, and adds the end of the block before: two additions per
place whatever the window, and nothing is subtracted. On a grid that is done along the columns and
then along the rows. The right block of a causal window on a grid is the left one of the row above,
moved right, which a last kernel adds; sums therefore go on past the right border.

A lane walks along one block, so that threads need nothing of each other. Sums are those of
`rows.py`, exact for any finite key. Backward the same kernels sum the targets that see a token:
from the other end of the sequence, or corner of the grid, those are its window.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .rows import (
    LOWEST,
    empty_sum,
    gated_mean,
    gradients_of_token,
    load_sum,
    merge,
    place_in,
    store_row,
    store_sum,
    target_of_token,
)


class Axis(NamedTuple):
    """Where the places of a line lie among tokens: first + line · between + place · step."""

    first: int
    between: int
    step: int


class Walk(NamedTuple):
    """How a kernel walks: over `lines` of `length` places, in blocks of `window`.

    A result is the sum of the `window` places that end `ahead` of its own, of which there are
    `results` in a line.
    """

    batch: int
    lines: int
    length: int
    results: int
    window: int
    ahead: int
    channels: int


class Block(NamedTuple):
    """Lanes and channels of a program, and places that are loaded at a time."""

    lanes: int
    rows: int
    channels: int


@triton.jit
def find_lanes(walk, blocks, BLOCK: tl.constexpr):
    """Sequence, line and first place of the block of each lane, its channels, and which exist."""
    LANES: tl.constexpr = BLOCK.lanes
    CHANNELS: tl.constexpr = BLOCK.channels
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)[:, None]
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    batch = lane // blocks // walk.lines
    real = (batch < walk.batch) & (channel < walk.channels)
    return batch, lane // blocks % walk.lines, lane % blocks * walk.window, channel, real


@triton.jit
def load_tokens(tensors, batch, token, channel, real):
    """Keys and values, −inf and 0 where there is none or it is hidden."""
    if tensors.key_mask is not None:
        at = tensors.key_mask[0] + batch * tensors.key_mask[1] + token * tensors.key_mask[2]
        real &= tl.load(at + 0 * channel, mask=real, other=0) != 0
    key = tl.load(place_in(tensors.key, batch, token, channel), mask=real, other=float('-inf'))
    value = tl.load(place_in(tensors.value, batch, token, channel), mask=real, other=0.0)
    return key, value


@triton.jit
def load_target(tensors, batch, token, channel, real, GATE: tl.constexpr):
    """The gradient of a query, and the sum that its target is to its keys."""
    high, first, second = load_sum(tensors.sums, batch, token, channel, real, LOWEST)
    gradient = tl.load(place_in(tensors.gradient, batch, token, channel), mask=real, other=0.0)
    query = gradient
    if GATE != 'none':
        query = tl.load(place_in(tensors.query, batch, token, channel), mask=real, other=0.0)
    return target_of_token(gradient, query, high, first, second, 'softmax', GATE)


@triton.jit
def load_place(source, walk, axis, where, place, real, KIND: tl.constexpr, GATE: tl.constexpr):
    """The sum that a place holds: of a key, of a target or of what another kernel left there."""
    batch, line, channel = where
    real &= (place >= 0) & (place < walk.length)
    token = axis.first + line * axis.between + place * axis.step
    if KIND == 'keys':
        high, first = load_tokens(source, batch, token, channel, real)
        high, first = high.to(tl.float32), first.to(tl.float32)
        second = tl.where(real, 1.0, 0.0)
    elif KIND == 'targets':
        _, high, first, second = load_target(source, batch, token, channel, real, GATE)
        high = tl.where(real, high, LOWEST)
    else:
        high, first, second = load_sum(source.sums, batch, token, channel, real, LOWEST)
    return high, first, second


@triton.jit
def finish(results, inputs, where, real, found, RESULT: tl.constexpr, GATE: tl.constexpr):
    """Write what comes of the sum of a window: itself, the output, or gradients."""
    batch, token, channel = where
    high, first, second = found
    if RESULT == 'output':
        query = first
        if GATE != 'none':
            query = tl.load(place_in(inputs.query, batch, token, channel), mask=real, other=0.0)
        mixed = gated_mean(query, first, second, 'softmax', GATE)
        store_row(results.output, place_in(results.output, batch, token, channel), 0, real, mixed)
    if RESULT == 'gradients':
        key, value = load_tokens(inputs, batch, token, channel, real)
        by_key, by_value = gradients_of_token(key, value, high, first, second, 'softmax')
        store_row(results.key, place_in(results.key, batch, token, channel), 0, real, by_key)
        store_row(results.value, place_in(results.value, batch, token, channel), 0, real, by_value)
        if results.query is not None:
            by_query, _, _, _ = load_target(inputs, batch, token, channel, real, GATE)
            at = place_in(results.query, batch, token, channel)
            store_row(results.query, at, 0, real, by_query)
    else:
        store_sum(results.sums, batch, token, channel, real, high, first, second)


@triton.jit
def ends_of_blocks(
    ends, source, walk, axis, KIND: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr
):
    """The sum from each place to the end of its block into ends [3, B, lines · length, D]."""
    ROWS: tl.constexpr = BLOCK.rows
    blocks = tl.cdiv(walk.length, walk.window)
    batch, line, start, channel, lanes = find_lanes(walk, blocks, BLOCK)
    high, first, second = empty_sum(BLOCK.lanes, BLOCK.channels)
    offset = tl.zeros([], tl.int64) + walk.window - 1
    while offset >= 0:
        loaded = ()
        for r in tl.static_range(ROWS):
            real = lanes & (offset >= r)
            where = batch, line, channel
            one = load_place(source, walk, axis, where, start + offset - r, real, KIND, GATE)
            loaded = loaded + (one,)
        for r in tl.static_range(ROWS):
            high, first, second = merge(
                high, first, second, loaded[r][0], loaded[r][1], loaded[r][2]
            )
            place = start + offset - r
            real = lanes & (offset >= r) & (place < walk.length)
            token = line * walk.length + place
            store_sum(ends, batch, token, channel, real, high, first, second)
        offset -= ROWS


@triton.jit
def sum_windows(results, inputs, source, ends, walk, axes, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the window of each result, and what :func:`finish` makes of it."""
    KIND: tl.constexpr = FORM[0]
    RESULT: tl.constexpr = FORM[1]
    GATE: tl.constexpr = FORM[2]
    ROWS: tl.constexpr = BLOCK.rows
    blocks = tl.cdiv(walk.results + walk.ahead, walk.window)
    batch, line, start, channel, lanes = find_lanes(walk, blocks, BLOCK)
    high, first, second = empty_sum(BLOCK.lanes, BLOCK.channels)
    offset = tl.zeros([], tl.int64)
    while offset < walk.window:
        loaded, before = (), ()
        for r in tl.static_range(ROWS):
            where, place = (batch, line, channel), start + offset + r
            inside = lanes & (offset + r < walk.window)
            one = load_place(source, walk, axes[0], where, place, inside, KIND, GATE)
            loaded = loaded + (one,)
            # The window of the last place of a block is the block.
            place = place - walk.window + 1
            real = inside & (offset + r < walk.window - 1) & (place >= 0) & (place < walk.length)
            one = load_sum(ends, batch, line * walk.length + place, channel, real, LOWEST)
            before = before + (one,)
        for r in tl.static_range(ROWS):
            high, first, second = merge(
                high, first, second, loaded[r][0], loaded[r][1], loaded[r][2]
            )
            found = merge(high, first, second, before[r][0], before[r][1], before[r][2])
            place = start + offset + r - walk.ahead
            real = lanes & (offset + r < walk.window) & (place >= 0) & (place < walk.results)
            token = axes[1].first + line * axes[1].between + place * axes[1].step
            finish(results, inputs, (batch, token, channel), real, found, RESULT, GATE)
        offset += ROWS


@triton.jit
def add_right_block(
    results, inputs, sums, walk, axis, half, FORM: tl.constexpr, BLOCK: tl.constexpr
):
    """The left block and that of the row above, `half` columns right, and :func:`finish`."""
    RESULT: tl.constexpr = FORM[1]
    GATE: tl.constexpr = FORM[2]
    batch, line, place, channel, real = find_lanes(walk, walk.length, BLOCK)
    width = walk.length + half
    found = load_sum(sums, batch, line * width + place, channel, real, LOWEST)
    above = (line - 1) * width + place + half
    right = load_sum(sums, batch, above, channel, real & (line > 0), LOWEST)
    found = merge(found[0], found[1], found[2], right[0], right[1], right[2])
    token = axis.first + line * axis.between + place * axis.step
    finish(results, inputs, (batch, token, channel), real, found, RESULT, GATE)
