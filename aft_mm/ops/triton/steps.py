"""Decoding steps: one token per sequence, one launch per layer.

A program owns some key heads of one sequence, with all their channels. It stores the token in its
slot of the buffer, adds the token that was there to the sums of those that left, and walks along
the buffer, `rows` tokens at a time.

A sum is (high, rest, numerator, denominator), the last two divided by ``e^(high + rest)``. high is
a key and rest a bias, which are never added: next to a key of 1e4 a bias would lose three digits.
The empty sum is (LOWEST, LOWEST, 0, 0).

No program reads what another one writes: the next positions are a new tensor, and the new token is
read from the input. Positions fit into 32 bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import triton
import triton.language as tl
from torch import Tensor

from ..geometry import Window, as_pair
from ..kernel_op import TOKENS, register
from ..state import StepState
from .block_sizes import cdiv, find_block
from .online_softmax import (
    LOWEST,
    Bools,
    Floats,
    Ints,
    Strided,
    Sum,
    add_token,
    exp,
    gate_value,
    load_entry,
    store_entry,
    strided,
)

BiasedSum: TypeAlias = tuple[Floats, Floats, Floats, Floats]


class StepTensors(NamedTuple):
    """Tensors of a step; those of the token are [B, 1, C].

    The table is that of w, or u, of which pos_v is v.
    """

    shift: Strided
    numerator: Strided
    denominator: Strided
    position: Strided
    next_position: Strided
    output: Strided
    query: Strided | None
    key: Strided
    value: Strided
    buffer_keys: Strided | None = None
    buffer_values: Strided | None = None
    table: Strided | None = None
    pos_v: Strided | None = None
    # Triton 3.6 drops constants (strides of 1) after the last None of a tuple.
    end: None = None


class StepForm(NamedTuple):
    """The kind of bias, its sizes, and the gate.

    outside_weight: whether W = 1 past the buffer and outside the window or kernel, else 0.
    """

    kind: str
    places: tuple[int, ...]
    outside_weight: bool
    gate: str


class StepSizes(NamedTuple):
    """Key heads, tokens in the buffer, terms of u · v; tokens from `limit` on have no bias."""

    heads: int
    buffer: int
    rank: int
    limit: int


class StepTile(NamedTuple):
    """Rows, heads and channels of a head in a tile, channels per head, and terms of u · v at once."""

    rows: int
    heads: int
    width: int
    per_head: int
    rank: int


@triton.jit
def find_heads(heads: 'Ints', HEADS: tl.constexpr) -> 'tuple[Ints, Ints, Ints, Bools]':
    """Return sequence, first head and heads [1, HEADS, 1] of this program, and which exist."""
    blocks = tl.cdiv(heads, HEADS)
    first = (tl.program_id(0) % blocks) * HEADS
    head = first + tl.arange(0, HEADS)[None, :, None]
    return (tl.program_id(0) // blocks).to(tl.int64), first, head.to(tl.int64), head < heads


@triton.jit
def load_evicted(x: 'StepTensors', batch: 'Ints', channel: 'Ints', real: 'Bools') -> 'Sum':
    high = load_entry(x.shift, batch, 0, channel, real, LOWEST)
    first = load_entry(x.numerator, batch, 0, channel, real)
    return high, first, load_entry(x.denominator, batch, 0, channel, real)


@triton.jit
def store_evicted(
    x: 'StepTensors', batch: 'Ints', channel: 'Ints', real: 'Bools', evicted: 'Sum'
) -> None:
    store_entry(x.shift, batch, 0, channel, real, evicted[0])
    store_entry(x.numerator, batch, 0, channel, real, evicted[1])
    store_entry(x.denominator, batch, 0, channel, real, evicted[2])


@triton.jit
def store_step_output(
    x: 'StepTensors',
    batch: 'Ints',
    channel: 'Ints',
    real: 'Bools',
    numerator: 'Floats',
    denominator: 'Floats',
    GATE: tl.constexpr,
) -> None:
    mixed = numerator / tl.where(denominator == 0, 1.0, denominator)
    if GATE != 'none':
        mixed *= gate_value(load_entry(x.query, batch, 0, channel, real), GATE)
    store_entry(x.output, batch, 0, channel, real, mixed)


@triton.jit
def advance(x: 'StepTensors', batch: 'Ints', first: 'Ints') -> 'Ints':
    """Return the index of the new token; the first program of a sequence stores the next index."""
    index = tl.load(x.position[0] + batch * x.position[1])  # []
    if first == 0:
        tl.store(x.next_position[0] + batch * x.next_position[1], index + 1)
    return index.to(tl.int32)


@triton.jit
def simple_step_kernel(
    x: 'StepTensors', channels: 'Ints', GATE: tl.constexpr, CHANNELS: tl.constexpr
) -> None:
    batch, start, channel, real = find_heads(channels, CHANNELS)
    evicted = load_evicted(x, batch, channel, real)
    key = load_entry(x.key, batch, 0, channel, real)  # [1, CHANNELS, 1]
    value = load_entry(x.value, batch, 0, channel, real)  # [1, CHANNELS, 1]
    evicted = add_token(evicted, key, value, 'softmax')
    store_evicted(x, batch, channel, real, evicted)
    store_step_output(x, batch, channel, real, evicted[1], evicted[2], GATE)
    advance(x, batch, start)


@triton.jit
def in_hard_window(token: 'Ints', tokens: 'Ints', PLACES: tl.constexpr) -> 'Bools':
    """Return which tokens a hard window sees (`geometry.hard_mask`); PLACES: width and halves."""
    down = tokens // PLACES[0] - token // PLACES[0]
    right = tokens % PLACES[0] - token % PLACES[0]
    down = tl.where(right > 0, down + 1, down)  # the right block is one row higher
    inside = (right > -PLACES[2]) & (right <= PLACES[2])
    return inside & (down > -PLACES[1]) & (down <= 0)


@triton.jit
def kernel_entry(token: 'Ints', tokens: 'Ints', PLACES: tl.constexpr) -> 'tuple[Ints, Bools]':
    """Return the kernel entry of the tokens, and whether there is one; PLACES: grid and kernel."""
    layer = tokens // (PLACES[1] * PLACES[2]) % PLACES[0]
    layer = layer - token // (PLACES[1] * PLACES[2]) % PLACES[0] + PLACES[3] // 2
    row = tokens // PLACES[2] % PLACES[1] - token // PLACES[2] % PLACES[1] + PLACES[4] // 2
    column = tokens % PLACES[2] - token % PLACES[2] + PLACES[5] // 2
    inside = (layer >= 0) & (layer < PLACES[3]) & (row >= 0) & (row < PLACES[4])
    inside = inside & (column >= 0) & (column < PLACES[5])
    return (layer * PLACES[4] + row) * PLACES[5] + column, inside


@triton.jit
def load_table(table: 'Strided', row: 'Ints', column: 'Ints', real: 'Bools') -> 'Floats':
    at = table[0] + row.to(tl.int64) * table[1] + column.to(tl.int64) * table[2]
    return tl.load(at, mask=real, other=0.0).to(tl.float32)


@triton.jit
def load_factor_bias(
    x: 'StepTensors',
    token: 'Ints',
    tokens: 'Ints',
    real: 'Bools',
    rank: 'Ints',
    BLOCK: tl.constexpr,
) -> 'Floats':
    """Return u_t · v_t' for the tokens [ROWS, 1, 1], some terms at a time."""
    bias = tl.zeros(tokens.shape, tl.float32)
    first = tl.zeros([], tl.int32)
    while first < rank:
        d = first + tl.arange(0, BLOCK.rank)[None, :, None]
        u = load_table(x.table, token, d, d < rank)  # [1, rank, 1]
        v = load_table(x.pos_v, tokens, d, real & (d < rank))  # [ROWS, rank, 1]
        bias += tl.sum(u * v, 1, keep_dims=True)
        first += BLOCK.rank
    return bias


@triton.jit
def load_step_bias(
    x: 'StepTensors',
    token: 'Ints',
    tokens: 'Ints',
    head: 'Ints',
    head_real: 'Bools',
    real: 'Bools',
    sizes: 'StepSizes',
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> 'tuple[Floats, Bools]':
    """Return w[token, tokens], [ROWS, 1, 1] or [ROWS, HEADS, 1], 0 outside, and which are inside."""
    PLACES: tl.constexpr = FORM.places
    # Entries past the table are neither read nor visible.
    inside = real & (token < sizes.limit)
    token = tl.minimum(token, sizes.limit - 1)
    if FORM.kind == 'window':
        inside &= in_hard_window(token, tokens, PLACES)
        bias = tl.zeros(tokens.shape, tl.float32)
    elif FORM.kind == 'conv':
        entry, there = kernel_entry(token, tokens, PLACES)
        inside &= there
        bias = load_table(x.table, head, entry, inside & head_real)  # [ROWS, HEADS, 1]
    elif FORM.kind == 'full':
        bias = load_table(x.table, token, tokens, inside)  # [ROWS, 1, 1]
    else:
        # Those of `geometry.near_mask`; PLACES: width of the grid and sizes of the window.
        inside &= tl.abs(tokens // PLACES[0] - token // PLACES[0]) < PLACES[1]
        inside &= tl.abs(tokens % PLACES[0] - token % PLACES[0]) < PLACES[2]
        if FORM.kind == 'free':
            column = PLACES[2] - 1 + tokens - token
            bias = load_table(x.table, token, column, inside)  # [ROWS, 1, 1]
        else:
            bias = load_factor_bias(x, token, tokens, inside, sizes.rank, BLOCK)  # [ROWS, 1, 1]
    return bias, inside


@triton.jit
def add_biased(
    total: 'BiasedSum', key: 'Floats', bias: 'Floats', value: 'Floats', visible: 'Bools'
) -> 'BiasedSum':
    """Add a token with this key and bias to the sum, in every lane and head."""
    high, rest, first, second = total
    visible &= (key != float('-inf')) & (bias != float('-inf'))
    key, bias = tl.where(visible, key, LOWEST), tl.where(visible, bias, LOWEST)
    lead = (key - high) + (bias - rest)
    step = exp(-tl.abs(lead))
    grows = lead > 0
    factor = tl.where(grows, step, 1.0)
    weight = tl.where(visible, tl.where(grows, 1.0, step), 0.0)
    first = first * factor + weight * tl.where(visible, value, 0.0)
    second = second * factor + weight
    return tl.where(grows, key, high), tl.where(grows, bias, rest), first, second


@triton.jit
def sum_buffer(
    x: 'StepTensors',
    fresh: 'tuple[Floats, Floats]',
    where: 'tuple[Ints, Ints, Bools, Ints, Bools]',
    now: 'Ints',
    slot: 'Ints',
    sizes: 'StepSizes',
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
) -> 'BiasedSum':
    """Sum the buffer, with the new key and value in place of what is in their slot."""
    ROWS: tl.constexpr = BLOCK.rows
    HEADS: tl.constexpr = BLOCK.heads
    WIDTH: tl.constexpr = BLOCK.width
    batch, head, head_real, channel, channel_real = where
    below = tl.zeros([ROWS, HEADS, 1], tl.float32)
    high, rest = below + LOWEST, below + LOWEST
    above = tl.zeros([ROWS, HEADS, WIDTH], tl.float32)
    filled = tl.minimum(now + 1, sizes.buffer)
    row = tl.zeros([], tl.int32)
    while row < filled:
        slots = row + tl.arange(0, ROWS)[:, None, None]
        real = slots < filled
        # Slots behind the new token hold tokens of the previous round.
        tokens = now - slot + slots - tl.where(slots > slot, sizes.buffer, 0)
        key = load_entry(x.buffer_keys, batch, slots, head, real & head_real)  # [ROWS, HEADS, 1]
        # [ROWS, HEADS, WIDTH]
        value = load_entry(x.buffer_values, batch, slots, channel, real & channel_real)
        key = tl.where(slots == slot, fresh[0], key)
        value = tl.where(slots == slot, fresh[1], value)
        w, near = load_step_bias(x, now, tokens, head, head_real, real, sizes, FORM, BLOCK)
        visible = head_real & (real if FORM.outside_weight else near)
        total = high, rest, above, below
        high, rest, above, below = add_biased(total, key, w, value, visible)
        row += ROWS
    # Merge the sums of the rows.
    top = tl.max(high, 0, keep_dims=True)
    lead = (high - top) + rest
    most = tl.max(lead, 0, keep_dims=True)
    weight = exp(lead - most)
    above = tl.sum(above * weight, 0, keep_dims=True)
    return top, most, above, tl.sum(below * weight, 0, keep_dims=True)


@triton.jit
def buffer_step_kernel(
    x: 'StepTensors', sizes: 'StepSizes', FORM: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    GATE: tl.constexpr = FORM.gate
    batch, start, head, head_real = find_heads(sizes.heads, BLOCK.heads)
    now = advance(x, batch, start)
    slot = now % sizes.buffer
    key = load_entry(x.key, batch, 0, head, head_real)  # [1, HEADS, 1]
    for part in range(0, BLOCK.per_head, BLOCK.width):
        offset = part + tl.arange(0, BLOCK.width)[None, None, :]
        channel, real = head * BLOCK.per_head + offset, head_real & (offset < BLOCK.per_head)
        value = load_entry(x.value, batch, 0, channel, real)  # [1, HEADS, WIDTH]
        where = batch, head, head_real, channel, real
        fresh = key, value
        high, rest, above, below = sum_buffer(x, fresh, where, now, slot, sizes, FORM, BLOCK)
        if FORM.outside_weight:
            full = now >= sizes.buffer
            # [1, HEADS, 1], then [1, HEADS, WIDTH]
            old = load_entry(x.buffer_keys, batch, slot, head, head_real & full, float('-inf'))
            old_value = load_entry(x.buffer_values, batch, slot, channel, real & full)
            evicted = load_evicted(x, batch, channel, real)
            evicted = add_token(evicted, old, old_value, 'softmax')
            lead = (high - evicted[0]) + rest
            near_scale, evicted_scale = exp(tl.minimum(lead, 0.0)), exp(-tl.maximum(lead, 0.0))
            above = above * near_scale + evicted[1] * evicted_scale
            below = below * near_scale + evicted[2] * evicted_scale
        store_step_output(x, batch, channel, real, above, below, GATE)
        # By now every warp has read the sums and the old token of the slot.
        tl.debug_barrier()
        if FORM.outside_weight:
            store_evicted(x, batch, channel, real, evicted)
        store_entry(x.buffer_values, batch, slot, channel, real, value)
    store_entry(x.buffer_keys, batch, slot, head, head_real, key)


# Width of a grid of one row, and the limit where there is no table.
ENDLESS = 2**31 - 1


def _new_results(value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    return value.new_empty(value.shape), position.new_empty(position.shape)


def _tensors(
    sums: Sequence[Tensor],
    position: Tensor,
    token: Sequence[Tensor | None],
    results: Sequence[Tensor],
    *others: Tensor | None,
) -> StepTensors:
    """Return the tensors in the form in which kernels take them; a token [B, C] as [B, 1, C]."""
    output, next_position = results
    rows = (None if x is None else (x, x.stride(0), 0, x.stride(1)) for x in (output, *token))
    before, after = map(strided, (*sums, position, next_position)), map(strided, others)
    return StepTensors(*before, *rows, *after)  # type: ignore[arg-type]


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
    sums, results = (shift, numerator, denominator), _new_results(value, position)
    tensors = _tensors(sums, position, (query, key, value), results)
    block, (batch, channels) = find_block('simple_step', value.device), value.shape
    options = dict(GATE=gate, CHANNELS=block.channels, num_warps=block.warps)
    simple_step_kernel[(batch * cdiv(channels, block.channels),)](tensors, channels, **options)
    return results


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
    *form: Any,
) -> tuple[Tensor, Tensor]:
    """Run a step of an op with a buffer; return the output [B, D] and the next position [B]."""
    sums, results = (shift, numerator, denominator), _new_results(value, position)
    kind, places, outside_weight, gate = form
    batch, heads = key.shape
    tensors = _tensors(sums, position, (query, key, value), results, keys, values, bias, pos_v)
    block = find_block('buffer_step', keys.device)
    size, per_head = keys.shape[1], value.shape[1] // heads
    rows = min(max(triton.next_power_of_2(size), block.least_rows), block.most_rows)
    width = min(triton.next_power_of_2(per_head), block.channels)
    tile = StepTile(rows, block.channels // width, width, per_head, block.rank)
    limit = bias.shape[0] if kind in ('full', 'free', 'factors') else ENDLESS
    sizes = StepSizes(heads, size, 0 if pos_v is None else pos_v.shape[1], limit)
    form = StepForm(kind, tuple(places), outside_weight, gate)
    options = dict(FORM=form, BLOCK=tile, num_warps=block.warps, maxnreg=block.registers)
    buffer_step_kernel[(batch * cdiv(heads, tile.heads),)](tensors, sizes, **options)
    return results


SUMS = 'Tensor(a!) shift, Tensor(b!) numerator, Tensor(c!) denominator'
simple_op = register(
    simple_step,
    f'{SUMS}, Tensor position, {TOKENS}, str gate',
    fake=lambda *inputs: _new_results(inputs[6], inputs[3]),
)
buffer_op = register(
    buffer_step,
    f'{SUMS}, Tensor(d!) keys, Tensor(e!) values, Tensor position, {TOKENS}, Tensor? bias, '
    'Tensor? pos_v, str kind, SymInt[] places, bool outside_weight, str gate',
    fake=lambda *inputs: _new_results(inputs[8], inputs[5]),
)


def aft_simple_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    key_function: str,
    gate: str,
) -> tuple[Tensor, StepState]:
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
    sums, *buffer, position = state
    inputs = *sums, *buffer, position, *tokens, bias, pos_v
    output, position = buffer_op(*inputs, kind, places, outside_weight, gate)
    return output, state._replace(position=position)


def aft_full_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    gate: str,
) -> tuple[Tensor, StepState]:
    return _step(state, (query, key, value), 'full', (), False, gate, position_bias)


def aft_local_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None,
    *,
    window: Window,
    grid: Sequence[int] | None,
    gate: str,
) -> tuple[Tensor, StepState]:
    kind = 'free' if pos_v is None else 'factors'
    places = _near_places(window, grid)
    return _step(state, (query, key, value), kind, places, True, gate, pos_u, pos_v)


def aft_local_hard_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    window: Window,
    grid: Sequence[int] | None,
    gate: str,
) -> tuple[Tensor, StepState]:
    width, rows, columns = _near_places(window, grid)
    halves = (rows, columns) if width == ENDLESS else (rows // 2, columns // 2)
    return _step(state, (query, key, value), 'window', (width, *halves), False, gate)


def aft_conv_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool,
    gate: str,
) -> tuple[Tensor, StepState]:
    kernel, ones = weight.shape[1:], (1,) * (3 - len(grid))
    places = (*ones, *grid, *ones, *kernel)
    tokens = query, key, value
    return _step(state, tokens, 'conv', places, global_connectivity, gate, weight.flatten(1))


def _near_places(window: Window, grid: Sequence[int] | None) -> tuple[int, int, int]:
    if grid is None or len(grid) == 1:
        return ENDLESS, 1, window if isinstance(window, int) else window[0]
    return grid[1], *as_pair(window)
