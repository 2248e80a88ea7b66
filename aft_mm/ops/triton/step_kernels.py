"""Kernels of a decoding step: one token of every sequence, one launch per layer.

A program owns the channels `first` … of one sequence, whole key heads. It stores the token in its
slot of the buffer, lets what lay there join the sums of the tokens that left, and walks along the
buffer, ROWS tokens at a time: each of them a lane with a sum of its own, joined at the end.

A sum is (high, rest, numerator, denominator): both divided by ``e^(high + rest)``, the key and the
bias of one token, which are never added up: next to a key of 1e4 a bias would lose three digits.
No token yet is (LOWEST, LOWEST, 0, 0).

Nothing that another program reads is written: the next positions go into a new tensor, the slot of
a key belongs to one program, and the new token is taken from the input, not from the buffer.
Positions fit into 32 bits.
"""

import triton
import triton.language as tl

from .rows import LOWEST, add_token, exp, gate_value

# Not the channels: where 16 divides them, the compiler loads 16 bytes at a time.
UNSPECIALIZED = ['size', 'rank', 'limit']


@triton.jit
def place(channels, COLUMNS: tl.constexpr):
    """The sequence and the channels [COLUMNS] of this program, and which of them exist."""
    blocks = tl.cdiv(channels, COLUMNS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    return batch, columns.to(tl.int64), columns < channels


@triton.jit
def load_sums(shift, numerator, denominator, batch, columns, inside):
    """The sums [B, 1, D] of the tokens that left the buffer."""
    high = tl.load(shift[0] + batch * shift[1] + columns * shift[3], mask=inside, other=LOWEST)
    at = numerator[0] + batch * numerator[1] + columns * numerator[3]
    first = tl.load(at, mask=inside, other=0.0)
    at = denominator[0] + batch * denominator[1] + columns * denominator[3]
    return high, first, tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_sums(shift, numerator, denominator, batch, columns, inside, high, first, second):
    """Write what :func:`load_sums` reads."""
    tl.store(shift[0] + batch * shift[1] + columns * shift[3], high, mask=inside)
    tl.store(numerator[0] + batch * numerator[1] + columns * numerator[3], first, mask=inside)
    at = denominator[0] + batch * denominator[1] + columns * denominator[3]
    tl.store(at, second, mask=inside)


@triton.jit
def load_token(x, batch, columns, inside):
    """Channels of x [B, C] in float32."""
    at = x[0] + batch * x[1] + columns * x[2]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_output(
    output, query, batch, columns, inside, channels, numerator, denominator, GATE: tl.constexpr
):
    """The gated mean, 0 where nothing was seen."""
    mixed = numerator / tl.where(denominator == 0, 1.0, denominator)
    if GATE != 'none':
        mixed *= gate_value(load_token(query, batch, columns, inside), GATE)
    at = output + batch * channels + columns
    tl.store(at, mixed.to(output.dtype.element_ty), mask=inside)


@triton.jit
def simple_step(
    output,
    next_position,
    shift,
    numerator,
    denominator,
    position,
    query,
    key,
    value,
    channels,
    GATE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """AFT-simple: the token joins the running sums."""
    batch, columns, inside = place(channels, COLUMNS)
    high, first, second = load_sums(shift, numerator, denominator, batch, columns, inside)
    new_key = load_token(key, batch, columns, inside)
    new_value = load_token(value, batch, columns, inside)
    high, first, second = add_token(high, first, second, new_key, new_value, 'softmax')
    store_sums(shift, numerator, denominator, batch, columns, inside, high, first, second)
    store_output(output, query, batch, columns, inside, channels, first, second, GATE)
    if tl.program_id(0) % tl.cdiv(channels, COLUMNS) == 0:
        tl.store(next_position + batch, tl.load(position[0] + batch * position[1]) + 1)


@triton.jit
def in_hard_window(token, tokens, PLACES: tl.constexpr):
    """Which tokens [ROWS] AFT-window sees, see `geometry.hard_mask`; PLACES: width and halves."""
    down = tokens // PLACES[0] - token // PLACES[0]
    right = tokens % PLACES[0] - token % PLACES[0]
    down = tl.where(right > 0, down + 1, down)  # the right block lies a row higher
    inside = (right > -PLACES[2]) & (right <= PLACES[2])
    return inside & (down > -PLACES[1]) & (down <= 0)


@triton.jit
def in_near_window(token, tokens, PLACES: tl.constexpr):
    """Which tokens [ROWS] AFT-local has a bias for, see `geometry.near_mask`; width and sizes."""
    down = tl.abs(tokens // PLACES[0] - token // PLACES[0])
    right = tl.abs(tokens % PLACES[0] - token % PLACES[0])
    return (down < PLACES[1]) & (right < PLACES[2])


@triton.jit
def kernel_entry(token, tokens, PLACES: tl.constexpr):
    """The kernel entry of the tokens [ROWS], and whether there is one; PLACES: grid and kernel."""
    layer = tokens // (PLACES[1] * PLACES[2]) % PLACES[0]
    layer = layer - token // (PLACES[1] * PLACES[2]) % PLACES[0] + PLACES[3] // 2
    row = tokens // PLACES[2] % PLACES[1] - token // PLACES[2] % PLACES[1] + PLACES[4] // 2
    column = tokens % PLACES[2] - token % PLACES[2] + PLACES[5] // 2
    inside = (layer >= 0) & (layer < PLACES[3]) & (row >= 0) & (row < PLACES[4])
    inside = inside & (column >= 0) & (column < PLACES[5])
    return (layer * PLACES[4] + row) * PLACES[5] + column, inside


@triton.jit
def load_factor_bias(
    pos_u, pos_v, token, tokens, real, rank, ROWS: tl.constexpr, RANK: tl.constexpr
):
    """u_t · v_t' for the tokens [ROWS], RANK terms at a time."""
    bias = tl.zeros([ROWS], tl.float32)
    first = tl.zeros([], tl.int32)
    u = pos_u[0] + token.to(tl.int64) * pos_u[1]
    v = pos_v[0] + tokens.to(tl.int64)[:, None] * pos_v[1]
    while first < rank:
        d = first + tl.arange(0, RANK)
        known = d < rank
        terms = tl.load(u + d * pos_u[2], mask=known, other=0.0).to(tl.float32)[None, :]
        terms *= tl.load(v + d[None, :] * pos_v[2], mask=real[:, None] & known[None, :], other=0.0)
        bias += tl.sum(terms, 1)
        first += RANK
    return bias


@triton.jit
def load_bias(
    bias,
    pos_v,
    token,
    tokens,
    real,
    head,
    rank,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
):
    """w[token, tokens], [ROWS, 1] or per channel [ROWS, COLUMNS], 0 outside the window or kernel,
    and which tokens [ROWS] are inside."""
    inside = real
    if KIND == 'window':
        inside &= in_hard_window(token, tokens, PLACES)
        found = tl.zeros([ROWS, 1], tl.float32)
    elif KIND == 'conv':
        entry, there = kernel_entry(token, tokens, PLACES)
        inside &= there
        at = bias[0] + head[None, :] * bias[1] + entry.to(tl.int64)[:, None] * bias[2]
        found = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
    elif KIND == 'full':
        at = bias[0] + token.to(tl.int64) * bias[1] + tokens.to(tl.int64) * bias[2]
        found = tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]
    else:
        inside &= in_near_window(token, tokens, PLACES)
        if KIND == 'free':
            column = PLACES[2] - 1 + tokens - token
            at = bias[0] + token.to(tl.int64) * bias[1] + column * bias[2]
            found = tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]
        else:
            found = load_factor_bias(bias, pos_v, token, tokens, inside, rank, ROWS, RANK)[:, None]
    return found, inside


@triton.jit
def add_biased(high, rest, first, second, key, bias, value, seen):
    """The sum with one more token of that key and bias, in every lane and channel."""
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
    """One sum [COLUMNS] of those of all lanes [ROWS, COLUMNS]."""
    top = tl.max(high, 0)
    lead = (high - top[None, :]) + rest
    most = tl.max(lead, 0)
    weight = exp(lead - most[None, :])
    return top, most, tl.sum(first * weight, 0), tl.sum(second * weight, 0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def buffer_step(
    output,
    next_position,
    shift,
    numerator,
    denominator,
    keys,
    values,
    position,
    query,
    key,
    value,
    bias,
    pos_v,
    channels,
    per_head,
    span,
    size,
    rank,
    limit,
    KIND: tl.constexpr,
    PLACES: tl.constexpr,
    FAR: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
):
    """The other ops. FAR: W = 1 past the buffer and outside the window or kernel, else 0.

    A program has `span` channels, per_head of them to a key head. The bias knows `limit` tokens.
    """
    blocks = tl.cdiv(channels, span)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks) * span
    end = tl.minimum(start + span, channels)
    index = tl.load(position[0] + batch * position[1])
    token = index.to(tl.int32)
    slot = token % size
    filled = tl.minimum(token + 1, size)
    key_row = keys[0] + batch * keys[1]
    value_row = values[0] + batch * values[1]
    lanes = tl.arange(0, ROWS)
    first = start
    while first < end:
        columns = (first + tl.arange(0, COLUMNS)).to(tl.int64)
        inside = columns < end
        head = columns // per_head
        new_key = load_token(key, batch, head, inside)
        new_value = load_token(value, batch, columns, inside)
        high = tl.zeros([ROWS, COLUMNS], tl.float32) + LOWEST
        rest = tl.zeros([ROWS, COLUMNS], tl.float32) + LOWEST
        above = tl.zeros([ROWS, COLUMNS], tl.float32)
        below = tl.zeros([ROWS, COLUMNS], tl.float32)
        row = tl.zeros([], tl.int32)
        while row < filled:
            slots = row + lanes
            real = slots < filled
            # What lies behind the new token is from the round before.
            tokens = token - slot + slots - tl.where(slots > slot, size, 0)
            shown = real[:, None] & inside[None, :]
            at = slots.to(tl.int64)[:, None]
            k = tl.load(key_row + at * keys[2] + head[None, :] * keys[3], mask=shown, other=0.0)
            v = tl.load(
                value_row + at * values[2] + columns[None, :] * values[3], mask=shown, other=0.0
            )
            fresh = (slots == slot)[:, None]
            k, v = tl.where(fresh, new_key[None, :], k), tl.where(fresh, new_value[None, :], v)
            w, near = load_bias(
                bias,
                pos_v,
                tl.minimum(token, limit - 1),  # what is past the table is not read, and not seen
                tokens,
                real & (token < limit),
                head,
                rank,
                KIND,
                PLACES,
                ROWS,
                RANK,
            )
            seen = shown
            if not FAR:
                seen = shown & near[:, None]
            high, rest, above, below = add_biased(high, rest, above, below, k, w, v, seen)
            row += ROWS
        high, rest, above, below = join_lanes(high, rest, above, below)
        if FAR:
            left = inside & (token >= size)
            at = slot.to(tl.int64)
            at_key = key_row + at * keys[2] + head * keys[3]
            k = tl.load(at_key, mask=left, other=float('-inf'))
            v = tl.load(value_row + at * values[2] + columns * values[3], mask=left, other=0.0)
            far_high, far_above, far_below = load_sums(
                shift, numerator, denominator, batch, columns, inside
            )
            far_high, far_above, far_below = add_token(
                far_high, far_above, far_below, k, v, 'softmax'
            )
            lead = (high - far_high) + rest
            near_scale = exp(tl.minimum(lead, 0.0))
            far_scale = exp(-tl.maximum(lead, 0.0))
            above = above * near_scale + far_above * far_scale
            below = below * near_scale + far_below * far_scale
        store_output(output, query, batch, columns, inside, channels, above, below, GATE)
        # Every warp has read the sums and what lay in the slot.
        tl.debug_barrier()
        if FAR:
            store_sums(
                shift,
                numerator,
                denominator,
                batch,
                columns,
                inside,
                far_high,
                far_above,
                far_below,
            )
        at = value_row + slot.to(tl.int64) * values[2] + columns * values[3]
        tl.store(at, new_value, mask=inside)
        first += COLUMNS
    first = start // per_head
    while first < tl.cdiv(end, per_head):
        head = (first + tl.arange(0, COLUMNS)).to(tl.int64)
        inside = head < tl.cdiv(end, per_head)
        new_key = load_token(key, batch, head, inside)
        at = key_row + slot.to(tl.int64) * keys[2] + head * keys[3]
        tl.store(at, new_key, mask=inside)
        first += COLUMNS
    if start == 0:
        tl.store(next_position + batch, index + 1)
