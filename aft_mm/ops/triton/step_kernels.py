"""Kernels of a decoding step: one token of every sequence, one launch per layer.

A program owns some key heads of one sequence, with all channels that they serve. It stores the
token in its slot of the buffer, lets what lay there join the sums of the tokens that left, and
walks along the buffer, `rows` tokens at a time: each of them a lane with a sum of its own, joined
at the end. Tiles are [rows, heads, width], with `width` channels of a head at a time: weights and
denominators are those of its key, [rows, heads, 1].

A sum is (high, rest, numerator, denominator): both divided by ``e^(high + rest)``, the key and the
bias of one token, which are never added up: next to a key of 1e4 a bias would lose three digits.
No token yet is (LOWEST, LOWEST, 0, 0).

Nothing that another program reads is written: the next positions go into a new tensor, the slot of
a key belongs to one program, and the new token is taken from the input, not from the buffer.
Positions fit into 32 bits.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .rows import LOWEST, add_token, exp, gate_value, place_in, store_row


class State(NamedTuple):
    """The state, and where the next positions [B] go; each (pointer, *strides) or None."""

    shift: tuple
    numerator: tuple
    denominator: tuple
    position: tuple
    next_position: tuple
    kept_keys: tuple | None = None
    kept_values: tuple | None = None
    # Triton 3.6 loses the constants, strides of 1, in what follows the last None of a tuple.
    end: None = None


class Token(NamedTuple):
    """The new token and its output, each [B, 1, C] as (pointer, *strides), the query or None."""

    output: tuple
    query: tuple | None
    key: tuple
    value: tuple
    end: None = None


class Bias(NamedTuple):
    """What w is made of: a table or u, and v [T, rank] or None; it knows `limit` tokens."""

    table: tuple | None
    pos_v: tuple | None
    rank: int
    limit: int
    end: None = None


class Form(NamedTuple):
    """Which bias, its sizes, and the gate.

    far: W = 1 past the buffer and outside of the window or kernel, else 0.
    """

    kind: str
    places: tuple[int, ...]
    far: bool
    gate: str


class Block(NamedTuple):
    """Rows, heads and channels of a head in a tile, channels per head, and terms of u · v."""

    rows: int
    heads: int
    width: int
    per_head: int
    rank: int


@triton.jit
def find_heads(heads, HEADS: tl.constexpr):
    """The sequence of this program, its first head, its heads [1, HEADS, 1], and which exist."""
    blocks = tl.cdiv(heads, HEADS)
    first = (tl.program_id(0) % blocks) * HEADS
    head = first + tl.arange(0, HEADS)[None, :, None]
    return (tl.program_id(0) // blocks).to(tl.int64), first, head.to(tl.int64), head < heads


@triton.jit
def load(x, batch, token, channel, real, other: tl.constexpr = 0.0):
    """x[batch, token, channel] in float32, `other` where `real` says that there is none."""
    return tl.load(place_in(x, batch, token, channel), mask=real, other=other).to(tl.float32)


@triton.jit
def store(x, batch, token, channel, real, row):
    """Write what :func:`load` reads."""
    store_row(x, place_in(x, batch, token, channel), 0, real, row)


@triton.jit
def load_far(state, batch, channel, real):
    """The sums of the tokens that left the buffer."""
    high = load(state.shift, batch, 0, channel, real, LOWEST)
    first = load(state.numerator, batch, 0, channel, real)
    return high, first, load(state.denominator, batch, 0, channel, real)


@triton.jit
def store_far(state, batch, channel, real, far):
    """Write what :func:`load_far` reads."""
    store(state.shift, batch, 0, channel, real, far[0])
    store(state.numerator, batch, 0, channel, real, far[1])
    store(state.denominator, batch, 0, channel, real, far[2])


@triton.jit
def store_output(token, batch, channel, real, numerator, denominator, GATE: tl.constexpr):
    """The gated mean, 0 where nothing was seen."""
    mixed = numerator / tl.where(denominator == 0, 1.0, denominator)
    if GATE != 'none':
        mixed *= gate_value(load(token.query, batch, 0, channel, real), GATE)
    store(token.output, batch, 0, channel, real, mixed)


@triton.jit
def advance(state, batch, first):
    """The index of the new token; the first program of the sequence writes that of the next one."""
    index = tl.load(state.position[0] + batch * state.position[1])
    if first == 0:
        tl.store(state.next_position[0] + batch * state.next_position[1], index + 1)
    return index.to(tl.int32)


@triton.jit
def simple_step(state, token, channels, GATE: tl.constexpr, CHANNELS: tl.constexpr):
    """AFT-simple: the token joins the running sums."""
    batch, start, channel, real = find_heads(channels, CHANNELS)
    far = load_far(state, batch, channel, real)
    key = load(token.key, batch, 0, channel, real)
    value = load(token.value, batch, 0, channel, real)
    far = add_token(far[0], far[1], far[2], key, value, 'softmax')
    store_far(state, batch, channel, real, far)
    store_output(token, batch, channel, real, far[1], far[2], GATE)
    advance(state, batch, start)


@triton.jit
def in_hard_window(token, tokens, PLACES: tl.constexpr):
    """Which tokens AFT-window sees, see `geometry.hard_mask`; PLACES: width and halves."""
    down = tokens // PLACES[0] - token // PLACES[0]
    right = tokens % PLACES[0] - token % PLACES[0]
    down = tl.where(right > 0, down + 1, down)  # the right block lies a row higher
    inside = (right > -PLACES[2]) & (right <= PLACES[2])
    return inside & (down > -PLACES[1]) & (down <= 0)


@triton.jit
def in_near_window(token, tokens, PLACES: tl.constexpr):
    """Which tokens AFT-local has a bias for, see `geometry.near_mask`; PLACES: width and sizes."""
    down = tl.abs(tokens // PLACES[0] - token // PLACES[0])
    right = tl.abs(tokens % PLACES[0] - token % PLACES[0])
    return (down < PLACES[1]) & (right < PLACES[2])


@triton.jit
def kernel_entry(token, tokens, PLACES: tl.constexpr):
    """The kernel entry of the tokens, and whether there is one; PLACES: grid and kernel."""
    layer = tokens // (PLACES[1] * PLACES[2]) % PLACES[0]
    layer = layer - token // (PLACES[1] * PLACES[2]) % PLACES[0] + PLACES[3] // 2
    row = tokens // PLACES[2] % PLACES[1] - token // PLACES[2] % PLACES[1] + PLACES[4] // 2
    column = tokens % PLACES[2] - token % PLACES[2] + PLACES[5] // 2
    inside = (layer >= 0) & (layer < PLACES[3]) & (row >= 0) & (row < PLACES[4])
    inside = inside & (column >= 0) & (column < PLACES[5])
    return (layer * PLACES[4] + row) * PLACES[5] + column, inside


@triton.jit
def load_table(table, row, column, real):
    """Entries of a table of two dimensions in float32."""
    at = table[0] + row.to(tl.int64) * table[1] + column.to(tl.int64) * table[2]
    return tl.load(at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def load_factor_bias(bias, token, tokens, real, BLOCK: tl.constexpr):
    """u_t · v_t' for the tokens [ROWS, 1, 1], some terms at a time."""
    found = tl.zeros(tokens.shape, tl.float32)
    first = tl.zeros([], tl.int32)
    while first < bias.rank:
        d = first + tl.arange(0, BLOCK.rank)[None, :, None]
        u = load_table(bias.table, token, d, d < bias.rank)
        v = load_table(bias.pos_v, tokens, d, real & (d < bias.rank))
        found += tl.sum(u * v, 1, keep_dims=True)
        first += BLOCK.rank
    return found


@triton.jit
def load_bias(bias, token, tokens, head, head_real, real, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """w[token, tokens], [ROWS, 1, 1] or per head [ROWS, HEADS, 1], 0 outside of the window or
    kernel, and which tokens are inside."""
    KIND: tl.constexpr = FORM.kind
    PLACES: tl.constexpr = FORM.places
    # What is past the table is not read, and not seen.
    inside = real & (token < bias.limit)
    token = tl.minimum(token, bias.limit - 1)
    if KIND == 'window':
        inside &= in_hard_window(token, tokens, PLACES)
        found = tl.zeros(tokens.shape, tl.float32)
    elif KIND == 'conv':
        entry, there = kernel_entry(token, tokens, PLACES)
        inside &= there
        found = load_table(bias.table, head, entry, inside & head_real)
    elif KIND == 'full':
        found = load_table(bias.table, token, tokens, inside)
    else:
        inside &= in_near_window(token, tokens, PLACES)
        if KIND == 'free':
            found = load_table(bias.table, token, PLACES[2] - 1 + tokens - token, inside)
        else:
            found = load_factor_bias(bias, token, tokens, inside, BLOCK)
    return found, inside


@triton.jit
def add_biased(high, rest, first, second, key, bias, value, seen):
    """The sum with one more token of that key and bias, in every lane and head."""
    seen &= (key != float('-inf')) & (bias != float('-inf'))
    key, bias = tl.where(seen, key, LOWEST), tl.where(seen, bias, LOWEST)
    lead = (key - high) + (bias - rest)
    step = exp(-tl.abs(lead))
    grows = lead > 0
    factor = tl.where(grows, step, 1.0)
    weight = tl.where(seen, tl.where(grows, 1.0, step), 0.0)
    first = first * factor + weight * tl.where(seen, value, 0.0)
    second = second * factor + weight
    return tl.where(grows, key, high), tl.where(grows, bias, rest), first, second


@triton.jit
def join_lanes(high, rest, first, second):
    """One sum of those of all lanes."""
    top = tl.max(high, 0, keep_dims=True)
    lead = (high - top) + rest
    most = tl.max(lead, 0, keep_dims=True)
    weight = exp(lead - most)
    first = tl.sum(first * weight, 0, keep_dims=True)
    return top, most, first, tl.sum(second * weight, 0, keep_dims=True)


@triton.jit
def sum_buffer(state, bias, fresh, where, time, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the buffer, with the fresh key and value in place of what lies in their slot."""
    FAR: tl.constexpr = FORM.far
    ROWS: tl.constexpr = BLOCK.rows
    HEADS: tl.constexpr = BLOCK.heads
    WIDTH: tl.constexpr = BLOCK.width
    batch, head, head_real, channel, channel_real = where
    token, slot, size = time
    below = tl.zeros([ROWS, HEADS, 1], tl.float32)
    high, rest = below + LOWEST, below + LOWEST
    above = tl.zeros([ROWS, HEADS, WIDTH], tl.float32)
    filled = tl.minimum(token + 1, size)
    row = tl.zeros([], tl.int32)
    while row < filled:
        slots = row + tl.arange(0, ROWS)[:, None, None]
        real = slots < filled
        # What lies behind the new token is from the round before.
        tokens = token - slot + slots - tl.where(slots > slot, size, 0)
        key = load(state.kept_keys, batch, slots.to(tl.int64), head, real & head_real)
        value = load(state.kept_values, batch, slots.to(tl.int64), channel, real & channel_real)
        key = tl.where(slots == slot, fresh[0], key)
        value = tl.where(slots == slot, fresh[1], value)
        w, near = load_bias(bias, token, tokens, head, head_real, real, FORM, BLOCK)
        seen = real & head_real
        if not FAR:
            seen = near & head_real
        high, rest, above, below = add_biased(high, rest, above, below, key, w, value, seen)
        row += ROWS
    return join_lanes(high, rest, above, below)


@triton.jit
def buffer_step(state, token, bias, heads, size, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """The other ops: `heads` key heads, a buffer of `size` tokens."""
    FAR: tl.constexpr = FORM.far
    GATE: tl.constexpr = FORM.gate
    PER_HEAD: tl.constexpr = BLOCK.per_head
    WIDTH: tl.constexpr = BLOCK.width
    batch, start, head, head_real = find_heads(heads, BLOCK.heads)
    now = advance(state, batch, start)
    slot = now % size
    at = slot.to(tl.int64)
    key = load(token.key, batch, 0, head, head_real)
    for part in range(0, PER_HEAD, WIDTH):
        place = part + tl.arange(0, WIDTH)[None, None, :]
        channel, real = head * PER_HEAD + place, head_real & (place < PER_HEAD)
        value = load(token.value, batch, 0, channel, real)
        where = batch, head, head_real, channel, real
        high, rest, above, below = sum_buffer(
            state, bias, (key, value), where, (now, slot, size), FORM, BLOCK
        )
        if FAR:
            left = now >= size
            old = load(state.kept_keys, batch, at, head, head_real & left, float('-inf'))
            old_value = load(state.kept_values, batch, at, channel, real & left)
            far = load_far(state, batch, channel, real)
            far = add_token(far[0], far[1], far[2], old, old_value, 'softmax')
            lead = (high - far[0]) + rest
            near_scale, far_scale = exp(tl.minimum(lead, 0.0)), exp(-tl.maximum(lead, 0.0))
            above = above * near_scale + far[1] * far_scale
            below = below * near_scale + far[2] * far_scale
        store_output(token, batch, channel, real, above, below, GATE)
        # Every warp has read the sums and what lay in the slot.
        tl.debug_barrier()
        if FAR:
            store_far(state, batch, channel, real, far)
        store(state.kept_values, batch, at, channel, real, value)
    store(state.kept_keys, batch, at, head, head_real, key)
