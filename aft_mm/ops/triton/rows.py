"""What the kernels are made of: running sums of one row of tokens at a time.

A program is one warp, which owns COLUMNS channels of one sequence and walks along its tokens, ROWS
at a time in registers. Each thread keeps the sums of its own channels, so that a step needs one
exponential and nothing of another thread; all loads of a block stand before its first store, past
which the compiler may not move them.

A sum is (high, numerator, denominator): both divided by ``e^high``, high the largest key seen. No
key yet is (LOWEST, 0, 0); else the denominator is at least 1, the weight of the largest key itself.
Only differences of keys meet ``exp``, so that keys of ±1e4 lose nothing.

Tensors come as tuples (pointer, *strides), and loops are `while`: the interpreter of Triton 3.6
cannot take a tensor as the bound of a range under numpy 2.4.
"""

import torch
import triton
import triton.language as tl

# −inf would give NaN where two empty sums meet.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def place(channels, COLUMNS: tl.constexpr):
    """The sequence and the channels [COLUMNS] of this program, and which of them exist."""
    blocks = tl.cdiv(channels, COLUMNS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    return batch, columns.to(tl.int64), columns < channels


@triton.jit
def find_rows(first, tokens, inside, ROWS: tl.constexpr):
    """Which channels of the rows `first` … `first + ROWS − 1` exist, a tuple."""
    rows = ()
    for r in tl.static_range(ROWS):
        rows = rows + (inside & (first + r < tokens),)
    return rows


@triton.jit
def load_rows(x, batch, first, columns, real, ROWS: tl.constexpr):
    """The rows of x [B, T, D] as a tuple, 0 where `real` says that there is none."""
    at = x[0] + batch * x[1] + first * x[2] + columns * x[3]
    rows = ()
    for r in tl.static_range(ROWS):
        rows = rows + (tl.load(at, mask=real[r], other=0.0),)
        at += x[2]
    return rows


@triton.jit
def load_tokens(key, value, key_mask, batch, first, tokens, columns, real, ROWS: tl.constexpr):
    """Rows of key and of value, and where they hold a token that is seen; hidden values are 0."""
    keys = load_rows(key, batch, first, columns, real, ROWS)
    values = load_rows(value, batch, first, columns, real, ROWS)
    seen = real
    if key_mask is not None:
        at = key_mask[0] + batch * key_mask[1] + first * key_mask[2]
        seen, shown = (), ()
        for r in tl.static_range(ROWS):
            keep = tl.load(at + r * key_mask[2], mask=first + r < tokens, other=0) != 0
            seen = seen + (real[r] & keep,)
            shown = shown + (tl.where(keep, values[r], 0.0),)
        values = shown
    return keys, values, seen


@triton.jit
def store_row(x, at, row, real):
    """Write a row of a contiguous tensor at the offsets `at`, in its type."""
    tl.store(x + at, row.to(x.dtype.element_ty), mask=real)


@triton.jit
def add_token(high, numerator, denominator, key, value, seen):
    """The sum with one more token, the factor of the sum before it and the token's own weight."""
    key = key.to(tl.float32)
    seen &= key != float('-inf')
    key = tl.where(seen, key, LOWEST)
    step = tl.exp(-tl.abs(high - key))
    grows = key > high
    factor = tl.where(grows, step, 1.0)
    weight = tl.where(seen, tl.where(grows, 1.0, step), 0.0)
    numerator = numerator * factor + weight * value.to(tl.float32)
    denominator = denominator * factor + weight
    return tl.where(grows, key, high), numerator, denominator, factor, weight


@triton.jit
def merge(high, first, second, other_high, other_first, other_second):
    """The sum of two sums."""
    step = tl.exp(-tl.abs(high - other_high))
    grows = other_high > high
    factor, other_factor = tl.where(grows, step, 1.0), tl.where(grows, 1.0, step)
    first = first * factor + other_first * other_factor
    second = second * factor + other_second * other_factor
    return tl.where(grows, other_high, high), first, second


@triton.jit
def empty_state(COLUMNS: tl.constexpr):
    """The sum of nothing."""
    zero = tl.zeros([COLUMNS], tl.float32)
    return zero + LOWEST, zero, zero


@triton.jit
def load_state(states, batch, index, columns, inside):
    """The three parts of states[:, batch, index, columns], of [3, B, N, D]."""
    at = states[0] + batch * states[2] + index * states[3] + columns
    high = tl.load(at, mask=inside, other=LOWEST)
    first = tl.load(at + states[1], mask=inside, other=0.0)
    # Twice the stride may not fit into its own type.
    second = tl.load(at + states[1] + states[1], mask=inside, other=0.0)
    return high, first, second


@triton.jit
def store_state(states, batch, index, columns, inside, high, first, second):
    """Write what :func:`load_state` reads."""
    at = states[0] + batch * states[2] + index * states[3] + columns
    tl.store(at, high, mask=inside)
    tl.store(at + states[1], first, mask=inside)
    tl.store(at + states[1] + states[1], second, mask=inside)


@triton.jit
def gate_value(query, GATE: tl.constexpr):
    """g(q)."""
    query = query.to(tl.float32)
    if GATE == 'sigmoid':
        gate = tl.sigmoid(query)
    else:
        gate = tl.where(query < 0, 0.0, query)  # a maximum would lose NaN
    return gate


@triton.jit
def gate_slope(query, GATE: tl.constexpr):
    """g'(q)."""
    query = query.to(tl.float32)
    if GATE == 'sigmoid':
        gate = tl.sigmoid(query)
        slope = gate * (1 - gate)
    else:
        slope = tl.where(query > 0, 1.0, 0.0)
    return slope
