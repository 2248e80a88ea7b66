"""What the scan, window and step kernels are made of: sums of tokens, exact for any finite key.

A sum is (high, first, second). Of softmax keys it is over ``e^high``, high the largest key seen:
``Σ e^(k − high) v`` and ``Σ e^(k − high)``, which is at least 1, the weight of the largest key
itself. Only differences of keys meet ``exp``, so that keys of ±1e4 lose nothing. Of relu keys high
is 0: ``Σ relu(k) v``, and ``Σ relu(−k) v`` where relu2 needs it. No token yet is (LOWEST, 0, 0).

Tensors come as tuples (pointer, *strides), and loops are `while`: the interpreter of Triton 3.6
cannot take a tensor as the bound of a range under numpy 2.4.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# −inf would give NaN where two empty sums meet.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
HIGHEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2_E = tl.constexpr(1.4426950408889634)


class Tensors(NamedTuple):
    """What kernels read or write, each (pointer, *strides) or None; `sums` are [3, B, T, D]."""

    query: tuple | None = None
    key: tuple | None = None
    value: tuple | None = None
    key_mask: tuple | None = None
    gradient: tuple | None = None
    output: tuple | None = None
    sums: tuple | None = None
    # Triton 3.6 loses the constants, strides of 1, in what follows the last None of a tuple.
    end: None = None


def strided(x: Tensor | None) -> tuple | None:
    """A tensor as kernels take it, (pointer, *strides); None stays None."""
    return None if x is None else (x, *x.stride())


@triton.jit
def exp(x):
    """e^x. Base 2 is one instruction, and 0 where float32 has no full digits left."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def merge(high, first, second, other_high, other_first, other_second):
    """The sum of two sums."""
    step = exp(-tl.abs(high - other_high))
    grows = other_high > high
    factor, other_factor = tl.where(grows, step, 1.0), tl.where(grows, 1.0, step)
    first = first * factor + other_first * other_factor
    second = second * factor + other_second * other_factor
    return tl.where(grows, other_high, high), first, second


@triton.jit
def empty_sum(ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """The sum of nothing."""
    zero = tl.zeros([ROWS, CHANNELS], tl.float32)
    return zero + LOWEST, zero, zero


@triton.jit
def relu(x):
    """max(x, 0), which keeps NaN as a maximum would not."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def visible(key):
    """The key, 0 if it is hidden: what relu of −k would not hide."""
    return tl.where(key == float('-inf'), 0.0, key)


@triton.jit
def add_token(high, first, second, key, value, KEY: tl.constexpr):
    """The sum with one more token, hidden if its key is −inf and its value 0."""
    key, value = key.to(tl.float32), value.to(tl.float32)
    if KEY == 'softmax':
        step = exp(-tl.abs(high - key))
        grows = key > high
        factor, weight = tl.where(grows, step, 1.0), tl.where(grows, 1.0, step)
        first, second = first * factor + weight * value, second * factor + weight
        high = tl.where(grows, key, high)
    else:
        high, first = tl.zeros_like(high), first + relu(key) * value
        if KEY == 'relu2':
            second += relu(-visible(key)) * value
    return high, first, second


@triton.jit
def gradients_of_token(key, value, high, first, second, KEY: tl.constexpr):
    """The gradients of key and value, 0 if hidden, from the sum of :func:`target_of_token`."""
    key, value = key.to(tl.float32), value.to(tl.float32)
    if KEY == 'softmax':
        weight = exp(key + high)
        by_key, by_value = weight * (value * first - second), weight * first
    else:
        by_key, by_value = tl.where(key > 0, value * first, 0.0), relu(key) * first
        if KEY == 'relu2':
            key = visible(key)
            by_key = tl.where(key < 0, -value * second, by_key)
            by_value += relu(-key) * second
    return by_key, by_value


@triton.jit
def gated_mean(query, first, second, KEY: tl.constexpr, GATE: tl.constexpr):
    """The output of a token from the sum that it sees, 0 where that is of nothing."""
    if KEY == 'relu2':
        query = query.to(tl.float32)
        mixed = relu(query) * first + relu(-query) * second
    else:
        # One division for the mean and the sigmoid, if that is the gate.
        divisor = tl.maximum(second, 1.0) if KEY == 'softmax' else 1.0
        mixed = first
        if GATE == 'sigmoid':
            divisor *= 1.0 + exp(-query.to(tl.float32))
        elif GATE == 'relu':
            mixed *= relu(query.to(tl.float32))
        mixed /= divisor
    return mixed


@triton.jit
def target_of_token(gradient, query, high, first, second, KEY: tl.constexpr, GATE: tl.constexpr):
    """The gradient of the query of a target that sees this sum, and the sum that it is to its keys.

    For softmax keys that is dy g(q) / d and dy g(q) n / d² over ``e^−high``, for relu keys dy g(q),
    for relu2 dy relu(q) and dy relu(−q).
    """
    gradient = gradient.to(tl.float32)
    if KEY == 'relu2':
        query = query.to(tl.float32)
        by_query = gradient * tl.where(query > 0, first, tl.where(query < 0, -second, 0.0))
        first, second = gradient * relu(query), gradient * relu(-query)
    else:
        inverse = 1.0 / tl.maximum(second, 1.0) if KEY == 'softmax' else 1.0
        mean = first * inverse
        by_query = gradient
        if GATE != 'none':
            by_query = gradient * mean * gate_slope(query, GATE)
            gradient *= gate_value(query, GATE)
        first = gradient * inverse
        second = first * mean
    return by_query, -high, first, second


@triton.jit
def add_target(high, first, second, target_high, target_first, target_second):
    """The sum with that of an earlier target, whose `high` is never the lower one."""
    step = exp(high - target_high)
    return target_high, first * step + target_first, second * step + target_second


@triton.jit
def place_in(x, batch, token, channel):
    """Where x[batch, token, channel] of x [B, T, D] lies; None of None."""
    at = x
    if x is not None:
        at = x[0] + batch * x[1] + token * x[2] + channel * x[3]
    return at


@triton.jit
def load_row(x, at, r: tl.constexpr, real, other: tl.constexpr):
    """The row r tokens past `at`, `other` where `real` says that there is none."""
    return tl.load(at + r * x[2], mask=real, other=other)


@triton.jit
def store_row(x, at, r: tl.constexpr, real, row):
    """Write what :func:`load_row` reads, in the type of x; nothing if x is None."""
    if x is not None:
        tl.store(at + r * x[2], row.to(x[0].dtype.element_ty), mask=real)


@triton.jit
def load_sum(sums, batch, token, channel, real, other: tl.constexpr):
    """The parts of sums[:, batch, token, channel] of [3, B, T, D], elsewhere (other, 0, 0)."""
    at = sums[0] + batch * sums[2] + token * sums[3] + channel * sums[4]
    high = tl.load(at, mask=real, other=other)
    first = tl.load(at + sums[1], mask=real, other=0.0)
    # Twice the stride may not fit into its own type.
    return high, first, tl.load(at + sums[1] + sums[1], mask=real, other=0.0)


@triton.jit
def store_sum(sums, batch, token, channel, real, high, first, second):
    """Write what :func:`load_sum` reads; nothing if `sums` is None."""
    if sums is not None:
        at = sums[0] + batch * sums[2] + token * sums[3] + channel * sums[4]
        tl.store(at, high, mask=real)
        tl.store(at + sums[1], first, mask=real)
        tl.store(at + sums[1] + sums[1], second, mask=real)


@triton.jit
def gate_value(query, GATE: tl.constexpr):
    """g(q)."""
    query = query.to(tl.float32)
    if GATE == 'sigmoid':
        gate = tl.sigmoid(query)
    else:
        gate = relu(query)
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
