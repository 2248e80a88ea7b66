"""Decoding steps: one token per sequence, one launch per layer.

A program owns some key heads of one sequence, with all their channels. It stores the token in its
slot of the buffer, adds the token that was there to the sums of those that left, and walks along
the buffer, `rows` tokens at a time. Each row has its own sum; they are merged at the end. Tiles are
[rows, heads, width] with `width` channels of a head at a time; weights and denominators are those
of the key, [rows, heads, 1].

A sum is (high, rest, numerator, denominator), the last two divided by ``e^(high + rest)``. high is
a key and rest a bias, which are never added: next to a key of 1e4 a bias would lose three digits.
The empty sum is (LOWEST, LOWEST, 0, 0).

No program reads what another one writes: the next positions are a new tensor, the slot of a key
belongs to one program, and the new token is read from the input. Positions fit into 32 bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..geometry import Window, as_pair
from ..state import StepState
from .block_sizes import BufferStepBlock, cdiv, find_block
from .online_softmax import LOWEST, add_token, exp, gate_value, place_in, store_entry, strided
from .torch_ops import register


class State(NamedTuple):
    """The state and the next positions [B], each (pointer, *strides) or None."""

    shift: tuple
    numerator: tuple
    denominator: tuple
    position: tuple
    next_position: tuple
    buffer_keys: tuple | None = None
    buffer_values: tuple | None = None
    # Triton 3.6 drops constants (strides of 1) after the last None of a tuple.
    end: None = None


class Token(NamedTuple):
    """The new token and its output, each [B, 1, C] as (pointer, *strides)."""

    output: tuple
    query: tuple | None
    key: tuple
    value: tuple
    end: None = None


class StepBias(NamedTuple):
    """The table of w, or u and v [T, rank]; tokens from `limit` on have no bias."""

    table: tuple | None
    pos_v: tuple | None
    rank: int
    limit: int
    end: None = None


class StepForm(NamedTuple):
    """The kind of bias, its sizes, and the gate.

    outside_weight: whether W = 1 past the buffer and outside the window or kernel, else 0.
    """

    kind: str
    places: tuple[int, ...]
    outside_weight: bool
    gate: str


class StepTile(NamedTuple):
    """Rows, heads and channels of a head in a tile, channels per head, and terms of u · v at once."""

    rows: int
    heads: int
    width: int
    per_head: int
    rank: int


@triton.jit
def find_heads(heads, HEADS: tl.constexpr):
    """Return sequence, first head and heads [1, HEADS, 1] of this program, and which exist."""
    blocks = tl.cdiv(heads, HEADS)
    first = (tl.program_id(0) % blocks) * HEADS
    head = first + tl.arange(0, HEADS)[None, :, None]
    return (tl.program_id(0) // blocks).to(tl.int64), first, head.to(tl.int64), head < heads


@triton.jit
def load_entry(x, batch, token, channel, real, other: tl.constexpr = 0.0):
    return tl.load(place_in(x, batch, token, channel), mask=real, other=other).to(tl.float32)


@triton.jit
def load_evicted(state, batch, channel, real):
    """Load the sums of the tokens that left the buffer."""
    high = load_entry(state.shift, batch, 0, channel, real, LOWEST)
    first = load_entry(state.numerator, batch, 0, channel, real)
    return high, first, load_entry(state.denominator, batch, 0, channel, real)


@triton.jit
def store_evicted(state, batch, channel, real, evicted):
    store_entry(state.shift, batch, 0, channel, real, evicted[0])
    store_entry(state.numerator, batch, 0, channel, real, evicted[1])
    store_entry(state.denominator, batch, 0, channel, real, evicted[2])


@triton.jit
def store_step_output(token, batch, channel, real, numerator, denominator, GATE: tl.constexpr):
    """Store the gated mean, 0 where nothing is visible."""
    mixed = numerator / tl.where(denominator == 0, 1.0, denominator)
    if GATE != 'none':
        mixed *= gate_value(load_entry(token.query, batch, 0, channel, real), GATE)
    store_entry(token.output, batch, 0, channel, real, mixed)


@triton.jit
def advance(state, batch, first):
    """Return the index of the new token; the first program of a sequence stores the next index."""
    index = tl.load(state.position[0] + batch * state.position[1])
    if first == 0:
        tl.store(state.next_position[0] + batch * state.next_position[1], index + 1)
    return index.to(tl.int32)


@triton.jit
def simple_step_kernel(state, token, channels, GATE: tl.constexpr, CHANNELS: tl.constexpr):
    batch, start, channel, real = find_heads(channels, CHANNELS)
    evicted = load_evicted(state, batch, channel, real)
    key = load_entry(token.key, batch, 0, channel, real)
    value = load_entry(token.value, batch, 0, channel, real)
    evicted = add_token(*evicted, key, value, 'softmax')
    store_evicted(state, batch, channel, real, evicted)
    store_step_output(token, batch, channel, real, evicted[1], evicted[2], GATE)
    advance(state, batch, start)


@triton.jit
def in_hard_window(token, tokens, PLACES: tl.constexpr):
    """Return which tokens a hard window sees (`geometry.hard_mask`); PLACES: width and halves."""
    down = tokens // PLACES[0] - token // PLACES[0]
    right = tokens % PLACES[0] - token % PLACES[0]
    down = tl.where(right > 0, down + 1, down)  # the right block is one row higher
    inside = (right > -PLACES[2]) & (right <= PLACES[2])
    return inside & (down > -PLACES[1]) & (down <= 0)


@triton.jit
def in_near_window(token, tokens, PLACES: tl.constexpr):
    """Return which tokens have a bias (`geometry.near_mask`); PLACES: width and sizes."""
    down = tl.abs(tokens // PLACES[0] - token // PLACES[0])
    right = tl.abs(tokens % PLACES[0] - token % PLACES[0])
    return (down < PLACES[1]) & (right < PLACES[2])


@triton.jit
def kernel_entry(token, tokens, PLACES: tl.constexpr):
    """Return the kernel entry of the tokens, and whether there is one; PLACES: grid and kernel."""
    layer = tokens // (PLACES[1] * PLACES[2]) % PLACES[0]
    layer = layer - token // (PLACES[1] * PLACES[2]) % PLACES[0] + PLACES[3] // 2
    row = tokens // PLACES[2] % PLACES[1] - token // PLACES[2] % PLACES[1] + PLACES[4] // 2
    column = tokens % PLACES[2] - token % PLACES[2] + PLACES[5] // 2
    inside = (layer >= 0) & (layer < PLACES[3]) & (row >= 0) & (row < PLACES[4])
    inside = inside & (column >= 0) & (column < PLACES[5])
    return (layer * PLACES[4] + row) * PLACES[5] + column, inside


@triton.jit
def load_table(table, row, column, real):
    at = table[0] + row.to(tl.int64) * table[1] + column.to(tl.int64) * table[2]
    return tl.load(at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def load_factor_bias(bias, token, tokens, real, BLOCK: tl.constexpr):
    """Return u_t · v_t' for the tokens [ROWS, 1, 1], some terms at a time."""
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
def load_step_bias(
    bias, token, tokens, head, head_real, real, FORM: tl.constexpr, BLOCK: tl.constexpr
):
    """Return w[token, tokens], [ROWS, 1, 1] or [ROWS, HEADS, 1], 0 outside, and which are inside."""
    KIND: tl.constexpr = FORM.kind
    PLACES: tl.constexpr = FORM.places
    # Entries past the table are neither read nor visible.
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
    """Add a token with this key and bias to the sum, in every lane and head."""
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
    top = tl.max(high, 0, keep_dims=True)
    lead = (high - top) + rest
    most = tl.max(lead, 0, keep_dims=True)
    weight = exp(lead - most)
    first = tl.sum(first * weight, 0, keep_dims=True)
    return top, most, first, tl.sum(second * weight, 0, keep_dims=True)


@triton.jit
def sum_buffer(state, bias, fresh, where, time, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Sum the buffer, with the new key and value in place of what is in their slot."""
    OUTSIDE: tl.constexpr = FORM.outside_weight
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
        # Slots behind the new token hold tokens of the previous round.
        tokens = token - slot + slots - tl.where(slots > slot, size, 0)
        key = load_entry(state.buffer_keys, batch, slots.to(tl.int64), head, real & head_real)
        value = load_entry(
            state.buffer_values, batch, slots.to(tl.int64), channel, real & channel_real
        )
        key = tl.where(slots == slot, fresh[0], key)
        value = tl.where(slots == slot, fresh[1], value)
        w, near = load_step_bias(bias, token, tokens, head, head_real, real, FORM, BLOCK)
        seen = real & head_real
        if not OUTSIDE:
            seen = near & head_real
        high, rest, above, below = add_biased(high, rest, above, below, key, w, value, seen)
        row += ROWS
    return join_lanes(high, rest, above, below)


@triton.jit
def buffer_step_kernel(state, token, bias, heads, size, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """The other ops, with `heads` key heads and a buffer of `size` tokens."""
    OUTSIDE: tl.constexpr = FORM.outside_weight
    GATE: tl.constexpr = FORM.gate
    PER_HEAD: tl.constexpr = BLOCK.per_head
    WIDTH: tl.constexpr = BLOCK.width
    batch, start, head, head_real = find_heads(heads, BLOCK.heads)
    now = advance(state, batch, start)
    slot = now % size
    at = slot.to(tl.int64)
    key = load_entry(token.key, batch, 0, head, head_real)
    for part in range(0, PER_HEAD, WIDTH):
        place = part + tl.arange(0, WIDTH)[None, None, :]
        channel, real = head * PER_HEAD + place, head_real & (place < PER_HEAD)
        value = load_entry(token.value, batch, 0, channel, real)
        where = batch, head, head_real, channel, real
        high, rest, above, below = sum_buffer(
            state, bias, (key, value), where, (now, slot, size), FORM, BLOCK
        )
        if OUTSIDE:
            buffer_full = now >= size
            old = load_entry(
                state.buffer_keys, batch, at, head, head_real & buffer_full, float('-inf')
            )
            old_value = load_entry(state.buffer_values, batch, at, channel, real & buffer_full)
            evicted = load_evicted(state, batch, channel, real)
            evicted = add_token(*evicted, old, old_value, 'softmax')
            lead = (high - evicted[0]) + rest
            near_scale, evicted_scale = exp(tl.minimum(lead, 0.0)), exp(-tl.maximum(lead, 0.0))
            above = above * near_scale + evicted[1] * evicted_scale
            below = below * near_scale + evicted[2] * evicted_scale
        store_step_output(token, batch, channel, real, above, below, GATE)
        # By now every warp has read the sums and the old token of the slot.
        tl.debug_barrier()
        if OUTSIDE:
            store_evicted(state, batch, channel, real, evicted)
        store_entry(state.buffer_values, batch, at, channel, real, value)
    store_entry(state.buffer_keys, batch, at, head, head_real, key)


# Width of a grid of one row, and the limit where there is no table.
ENDLESS = 2**31 - 1
STATE = ('shift', 'numerator', 'denominator', 'keys', 'values')


def _as_token(x: Tensor | None) -> tuple | None:
    """Return x [B, C] in the form in which kernels take [B, 1, C]."""
    return None if x is None else (x, x.stride(0), 0, x.stride(1))


def _new_results(value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), position.new_empty(position.shape)


def _bundle(sums, position, query, key, value, *buffer) -> tuple[State, Token, tuple]:
    """Return the arguments of the kernels, and the results among them."""
    results = _new_results(value, position)
    state = State(*map(strided, (*sums, position, results[1], *buffer)))
    return state, Token(*map(_as_token, (results[0], query, key, value))), results


def simple_step(
    shift: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    position: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    gate: str,
) -> tuple[Tensor, Tensor]:
    """Run a step of AFT-simple; return the output [B, D] and the next position [B]."""
    sums, (batch, channels) = (shift, numerator, denominator), value.shape
    state, token, results = _bundle(sums, position, query, key, value)
    block = find_block('simple_step', value.device)
    programs = batch * cdiv(channels, block.channels)
    if programs:
        with torch.cuda.device_of(value):
            simple_step_kernel[(programs,)](
                state, token, channels, GATE=gate, CHANNELS=block.channels, num_warps=block.warps
            )
    return results


def find_sizes(block: BufferStepBlock, size: int, per_head: int) -> StepTile:
    rows = min(max(triton.next_power_of_2(size), block.least_rows), block.most_rows)
    width = min(triton.next_power_of_2(per_head), block.channels)
    return StepTile(rows, block.channels // width, width, per_head, block.rank)


def buffer_step(
    shift: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    pos_v: Tensor | None,
    kind: str,
    places: Sequence[int],
    outside_weight: bool,
    gate: str,
) -> tuple[Tensor, Tensor]:
    """Run a step of an op with a buffer; return the output [B, D] and the next position [B]."""
    sums = shift, numerator, denominator
    state, token, results = _bundle(sums, position, query, key, value, keys, values)
    batch, heads = key.shape
    if batch == 0:
        return results
    block = find_block('buffer_step', keys.device)
    sizes = find_sizes(block, keys.shape[1], value.shape[1] // heads)
    limit = len(bias) if kind in ('full', 'free', 'factors') else ENDLESS
    rank = 0 if pos_v is None else pos_v.shape[1]
    with torch.cuda.device_of(value):
        buffer_step_kernel[(batch * cdiv(heads, sizes.heads),)](
            state,
            token,
            StepBias(strided(bias), strided(pos_v), rank, limit),
            heads,
            keys.shape[1],
            FORM=StepForm(kind, tuple(places), outside_weight, gate),
            BLOCK=sizes,
            num_warps=block.warps,
            maxnreg=block.registers,
        )
    return results


def _empty_simple(shift, numerator, denominator, position, query, key, value, gate):
    return _new_results(value, position)


def _empty_buffer(shift, numerator, denominator, keys, values, position, query, key, value, *bias):
    return _new_results(value, position)


simple_op = register(simple_step, fake=_empty_simple, mutates=STATE[:3])
buffer_op = register(buffer_step, fake=_empty_buffer, mutates=STATE)


def aft_simple_step(state, query, key, value, *, key_function, gate) -> tuple[Tensor, StepState]:
    """O(D): add the token to the running sums."""
    output, position = simple_op(*state.sums, state.position, query, key, value, gate)
    return output, state._replace(position=position)


def _step(
    state: StepState,
    tokens: Sequence[Tensor | None],
    kind: str,
    places: Sequence[int],
    outside_weight: bool,
    gate: str,
    bias: Tensor | None = None,
    pos_v: Tensor | None = None,
) -> tuple[Tensor, StepState]:
    sums, keys, values, position = state
    output, position = buffer_op(
        *sums, keys, values, position, *tokens, bias, pos_v, kind, places, outside_weight, gate
    )
    return output, state._replace(position=position)


def aft_full_step(state, query, key, value, position_bias, *, gate) -> tuple[Tensor, StepState]:
    """O(T·D): weight every token so far by the row of w."""
    return _step(state, (query, key, value), 'full', (), False, gate, position_bias)


def aft_local_step(
    state, query, key, value, pos_u, pos_v, *, window, grid, gate
) -> tuple[Tensor, StepState]:
    """O(r·D): the row of w over the buffer, and the sums of the tokens that left it."""
    kind = 'free' if pos_v is None else 'factors'
    places = _near_places(window, grid)
    return _step(state, (query, key, value), kind, places, True, gate, pos_u, pos_v)


def aft_local_hard_step(
    state, query, key, value, *, window, grid, gate
) -> tuple[Tensor, StepState]:
    """O(r·D): the buffer holds the window."""
    width, rows, columns = _near_places(window, grid)
    halves = (rows, columns) if width == ENDLESS else (rows // 2, columns // 2)
    return _step(state, (query, key, value), 'window', (width, *halves), False, gate)


def aft_conv_step(
    state, query, key, value, weight, *, grid, global_connectivity, gate
) -> tuple[Tensor, StepState]:
    """O(r·D): the kernel over the buffer, and with W = 1 the sums of the tokens that left it."""
    kernel, ones = weight.shape[1:], (1,) * (3 - len(grid))
    places = (*ones, *grid, *ones, *kernel)
    tokens = query, key, value
    return _step(state, tokens, 'conv', places, global_connectivity, gate, weight.flatten(1))


def _near_places(window: Window, grid: Sequence[int] | None) -> tuple[int, int, int]:
    """Return the width of the grid, and the rows and columns of the window."""
    if grid is None or len(grid) == 1:
        return ENDLESS, 1, window if isinstance(window, int) else window[0]
    return grid[1], *as_pair(window)
