"""Kernels of causal AFT-simple: ``y_t = g(q_t) n_t / d_t`` with running sums n, d of e^k v, e^k.

The sequence is cut into chunks, one program each. With one chunk a single pass reads and writes
everything once. With several, each chunk is summed first, an exclusive prefix over the chunks says
what each starts from, and then the chunks run side by side.

The forward pass saves the sums before every block of ROWS tokens. The backward pass reruns a block
from them, keeping per token its factor f_t (what the sum before it was multiplied by), its weight
w_t = e^{k_t − m_t}, 1/d_t and o_t = n_t/d_t, and then walks back: with go = dy · g(q),

    a_t = go_t / d_t + f_{t+1} a_{t+1}        c_t = go_t o_t / d_t + f_{t+1} c_{t+1}
    dv_t = w_t a_t    dk_t = w_t (v_t a_t − c_t)    dq_t = dy_t g'(q_t) o_t.

f and w are at most 1 and d at least 1, so nothing overflows; ``e^{−log d}`` of keys of 1e4 would
carry the rounding of that 1e4.
"""

import triton
import triton.language as tl

from .rows import (
    add_token,
    empty_state,
    find_rows,
    gate_slope,
    gate_value,
    load_rows,
    load_state,
    load_tokens,
    merge,
    place,
    store_row,
    store_state,
)

UNSPECIALIZED = ['tokens', 'chunk', 'count']


@triton.jit(do_not_specialize=UNSPECIALIZED)
def chunk_sums(
    sums,
    key,
    value,
    key_mask,
    tokens,
    channels,
    chunk,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The sum of each chunk into sums [3, B, chunks, D]."""
    batch, columns, inside = place(channels, COLUMNS)
    index = tl.program_id(1).to(tl.int64)
    first = index * chunk
    last = tl.minimum(first + chunk, tokens)
    high, numerator, denominator = empty_state(COLUMNS)
    while first < last:
        real = find_rows(first, tokens, inside, ROWS)
        keys, values, seen = load_tokens(
            key, value, key_mask, batch, first, tokens, columns, real, ROWS
        )
        for r in tl.static_range(ROWS):
            high, numerator, denominator, _, _ = add_token(
                high, numerator, denominator, keys[r], values[r], seen[r]
            )
        first += ROWS
    store_state(sums, batch, index, columns, inside, high, numerator, denominator)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def prefix(
    sums,
    channels,
    count,
    REVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """In place, the sum of all chunks before each one, or after each one if REVERSE."""
    batch, columns, inside = place(channels, COLUMNS)
    high, first, second = empty_state(COLUMNS)
    step = tl.zeros([], tl.int64)
    while step < count:
        loaded = ()
        for r in tl.static_range(ROWS):
            index = count - 1 - step - r if REVERSE else step + r
            real = inside & (step + r < count)
            loaded = loaded + (load_state(sums, batch, index, columns, real),)
        for r in tl.static_range(ROWS):
            index = count - 1 - step - r if REVERSE else step + r
            real = inside & (step + r < count)
            store_state(sums, batch, index, columns, real, high, first, second)
            high, first, second = merge(
                high, first, second, loaded[r][0], loaded[r][1], loaded[r][2]
            )
        step += ROWS


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward(
    output,
    saved,
    starts,
    query,
    key,
    value,
    key_mask,
    tokens,
    channels,
    chunk,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Output, and the sums before each block into saved [3, B, blocks, D] unless that is None.

    `starts` is what :func:`prefix` left in the sums of the chunks, None for a single chunk.
    """
    batch, columns, inside = place(channels, COLUMNS)
    index = tl.program_id(1).to(tl.int64)
    first = index * chunk
    last = tl.minimum(first + chunk, tokens)
    if starts is None:
        high, numerator, denominator = empty_state(COLUMNS)
    else:
        high, numerator, denominator = load_state(starts, batch, index, columns, inside)
    while first < last:
        real = find_rows(first, tokens, inside, ROWS)
        keys, values, seen = load_tokens(
            key, value, key_mask, batch, first, tokens, columns, real, ROWS
        )
        if GATE != 'none':
            queries = load_rows(query, batch, first, columns, real, ROWS)
        if saved is not None:
            store_state(saved, batch, first // ROWS, columns, inside, high, numerator, denominator)
        at = (batch * tokens + first) * channels + columns
        for r in tl.static_range(ROWS):
            high, numerator, denominator, _, _ = add_token(
                high, numerator, denominator, keys[r], values[r], seen[r]
            )
            # One division for the mean and the sigmoid, if that is the gate.
            divisor = tl.maximum(denominator, 1.0)
            scaled = numerator
            if GATE == 'sigmoid':
                divisor *= 1.0 + tl.exp(-queries[r].to(tl.float32))
            if GATE == 'relu':
                scaled *= gate_value(queries[r], GATE)
            store_row(output, at, scaled / divisor, real[r])
            at += channels
        first += ROWS


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward_chunk_sums(
    sums,
    saved,
    gradient,
    query,
    key,
    value,
    key_mask,
    tokens,
    channels,
    chunk,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """(−m, a, c) of each chunk into sums, a and c as the last token before it sees them, m its m.

    Only that m may scale them: a larger one starves earlier tokens, and none of these exceeds it.
    """
    batch, columns, inside = place(channels, COLUMNS)
    index = tl.program_id(1).to(tl.int64)
    first = index * chunk
    last = tl.minimum(first + chunk, tokens)
    high, numerator, denominator = load_state(saved, batch, first // ROWS, columns, inside)
    before = high
    by_value = tl.zeros([COLUMNS], tl.float32)
    by_weight = tl.zeros([COLUMNS], tl.float32)
    while first < last:
        real = find_rows(first, tokens, inside, ROWS)
        keys, values, seen = load_tokens(
            key, value, key_mask, batch, first, tokens, columns, real, ROWS
        )
        grads = load_rows(gradient, batch, first, columns, real, ROWS)
        if GATE != 'none':
            queries = load_rows(query, batch, first, columns, real, ROWS)
        for r in tl.static_range(ROWS):
            high, numerator, denominator, _, _ = add_token(
                high, numerator, denominator, keys[r], values[r], seen[r]
            )
            inverse = 1.0 / tl.maximum(denominator, 1.0)
            scaled = grads[r].to(tl.float32) * inverse * tl.exp(before - high)
            if GATE != 'none':
                scaled *= gate_value(queries[r], GATE)
            by_value += scaled
            by_weight += scaled * numerator * inverse
        first += ROWS
    store_state(sums, batch, index, columns, inside, -before, by_value, by_weight)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def backward(
    query_gradient,
    key_gradient,
    value_gradient,
    saved,
    ends,
    gradient,
    query,
    key,
    value,
    key_mask,
    tokens,
    channels,
    chunk,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of query, key and value.

    `ends` is what :func:`prefix` left in the backward sums, None for a single chunk.
    """
    batch, columns, inside = place(channels, COLUMNS)
    index = tl.program_id(1).to(tl.int64)
    start = index * chunk
    last = tl.minimum(start + chunk, tokens)
    by_value = tl.zeros([COLUMNS], tl.float32)
    by_weight = tl.zeros([COLUMNS], tl.float32)
    if ends is not None:
        _, by_value, by_weight = load_state(ends, batch, index, columns, inside)
    # What the later chunks hold is scaled for the last token of this one.
    later_factor = tl.zeros([COLUMNS], tl.float32) + 1.0
    first = start + (last - start - 1) // ROWS * ROWS
    while first >= start:
        real = find_rows(first, tokens, inside, ROWS)
        keys, values, seen = load_tokens(
            key, value, key_mask, batch, first, tokens, columns, real, ROWS
        )
        grads = load_rows(gradient, batch, first, columns, real, ROWS)
        if GATE != 'none':
            queries = load_rows(query, batch, first, columns, real, ROWS)
        high, numerator, denominator = load_state(saved, batch, first // ROWS, columns, inside)
        at = (batch * tokens + first) * channels + columns
        factors, weights, scales, means = (), (), (), ()
        for r in tl.static_range(ROWS):
            high, numerator, denominator, factor, weight = add_token(
                high, numerator, denominator, keys[r], values[r], seen[r]
            )
            inverse = 1.0 / tl.maximum(denominator, 1.0)
            mean = numerator * inverse
            grad = grads[r].to(tl.float32)
            if GATE != 'none':
                by_query = grad * mean * gate_slope(queries[r], GATE)
                store_row(query_gradient, at, by_query, real[r])
                at += channels
                grad *= gate_value(queries[r], GATE)
            factors = factors + (factor,)
            weights = weights + (weight,)
            scales = scales + (grad * inverse,)
            means = means + (mean,)
        at = (batch * tokens + first + ROWS - 1) * channels + columns
        for r in tl.static_range(ROWS - 1, -1, -1):
            by_value = by_value * later_factor + scales[r]
            by_weight = by_weight * later_factor + scales[r] * means[r]
            later_factor = factors[r]
            by_key = weights[r] * (values[r].to(tl.float32) * by_value - by_weight)
            store_row(value_gradient, at, weights[r] * by_value, real[r])
            store_row(key_gradient, at, by_key, real[r])
            at -= channels
        first -= ROWS
