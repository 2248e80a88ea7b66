"""Online softmax sums for the scan and step kernels, exact for every finite key.

A sum is (high, first, second). For softmax keys, high is the largest key seen, and the sum holds
``Σ e^(k − high) v`` and ``Σ e^(k − high)``, at least 1. Only differences of keys are exponentiated,
so keys of ±1e4 lose no digits. For relu keys high is 0, and the sum holds ``Σ relu(k) v`` and, for
relu2, ``Σ relu(−k) v``. The empty sum is (LOWEST, 0, 0).

Loops are `while` loops, as Triton's interpreter takes no tensor as the bound of a range.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

# −inf would give NaN when two empty sums are merged.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
HIGHEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2_E = tl.constexpr(1.4426950408889634)

# Numbers in kernels, or blocks of them. Kernels annotate with strings: at each launch, Triton
# compares the globals that a kernel names.
Pointers: TypeAlias = tl.tensor
Ints: TypeAlias = tl.tensor
Floats: TypeAlias = tl.tensor
Bools: TypeAlias = tl.tensor
Sum: TypeAlias = tuple[Floats, Floats, Floats]
Place: TypeAlias = tuple[Ints, Ints, Ints]  # sequence, token and channel
# (tensor, *strides), in kernels (pointer, *strides).
Strided: TypeAlias = tuple[Any, ...]


class Tensors(NamedTuple):
    """Tensors of a kernel; `sums` are [3, B, T, D]."""

    query: Strided | None = None
    key: Strided | None = None
    value: Strided | None = None
    key_mask: Strided | None = None
    gradient: Strided | None = None
    output: Strided | None = None
    sums: Strided | None = None
    # Triton 3.6 drops constants (strides of 1) after the last None of a tuple.
    end: None = None


@overload
def strided(x: Tensor) -> Strided: ...
@overload
def strided(x: Tensor | None) -> Strided | None: ...
def strided(x: Tensor | None) -> Strided | None:
    """Return (x, *strides), the form in which kernels take a tensor."""
    return None if x is None else (x, *x.stride())


def new_wanted(inputs: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    pairs = zip(inputs, wanted, strict=False)
    return [x.new_empty(x.shape) if needed else None for x, needed in pairs]


def new_sums(value: Tensor, count: int) -> Tensor:
    batch, _, channels = value.shape
    return torch.empty(3, batch, count, channels, dtype=torch.float32, device=value.device)


@triton.jit
def exp(x: 'Floats') -> 'Floats':
    """Return e^x by exp2, which is one instruction and flushes subnormal results to 0."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def merge(
    high: 'Floats',
    first: 'Floats',
    second: 'Floats',
    other_high: 'Floats',
    other_first: 'Floats',
    other_second: 'Floats',
) -> 'Sum':
    step = exp(-tl.abs(high - other_high))
    grows = other_high > high
    factor, other_factor = tl.where(grows, step, 1.0), tl.where(grows, 1.0, step)
    first = first * factor + other_first * other_factor
    second = second * factor + other_second * other_factor
    return tl.where(grows, other_high, high), first, second


@triton.jit
def empty_sum(ROWS: tl.constexpr, CHANNELS: tl.constexpr) -> 'Sum':
    zero = tl.zeros([ROWS, CHANNELS], tl.float32)
    return zero + LOWEST, zero, zero


@triton.jit
def relu(x: 'Floats') -> 'Floats':
    """Return max(x, 0), but NaN for NaN, unlike a maximum."""
    return tl.where(x < 0, 0.0, x)


@triton.jit
def zero_if_hidden(key: 'Floats') -> 'Floats':
    """Return the key, or 0 if it is hidden (−inf), because relu(−k) would not hide it."""
    return tl.where(key == float('-inf'), 0.0, key)


@triton.jit
def add_token(total: 'Sum', key: 'Floats', value: 'Floats', KEY: tl.constexpr) -> 'Sum':
    """Add a token to the sum; a hidden token has key −inf and value 0."""
    high, first, second = total
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
            second += relu(-zero_if_hidden(key)) * value
    return high, first, second


@triton.jit
def gradients_of_token(
    key: 'Floats', value: 'Floats', total: 'Sum', KEY: tl.constexpr
) -> 'tuple[Floats, Floats]':
    """Return the gradients of key and value, 0 if hidden, from a sum of :func:`target_of_token`."""
    high, first, second = total
    key, value = key.to(tl.float32), value.to(tl.float32)
    if KEY == 'softmax':
        weight = exp(key + high)
        grad_key, grad_value = weight * (value * first - second), weight * first
    else:
        grad_key, grad_value = tl.where(key > 0, value * first, 0.0), relu(key) * first
        if KEY == 'relu2':
            key = zero_if_hidden(key)
            grad_key = tl.where(key < 0, -value * second, grad_key)
            grad_value += relu(-key) * second
    return grad_key, grad_value


@triton.jit
def denominator_of(second: 'Floats', UNITS: tl.constexpr) -> 'Floats':
    """Return `second`, or 1 for the empty sum; with UNITS other sums may be less than 1."""
    return tl.where(second == 0, 1.0, second) if UNITS else tl.maximum(second, 1.0)


@triton.jit
def gated_mean(
    query: 'Floats', total: 'Sum', KEY: tl.constexpr, GATE: tl.constexpr, UNITS: tl.constexpr
) -> 'Floats':
    """Return the output of a token from the sum that it sees; 0 for the empty sum."""
    _, first, second = total
    if KEY == 'relu2':
        query = query.to(tl.float32)
        mixed = relu(query) * first + relu(-query) * second
    else:
        # One division for both the mean and a sigmoid gate.
        divisor = denominator_of(second, UNITS) if KEY == 'softmax' else 1.0
        mixed = first
        if GATE == 'sigmoid':
            divisor *= 1.0 + exp(-query.to(tl.float32))
        elif GATE == 'relu':
            mixed *= relu(query.to(tl.float32))
        mixed /= divisor
    return mixed


@triton.jit
def target_of_token(
    gradient: 'Floats',
    query: 'Floats',
    total: 'Sum',
    KEY: tl.constexpr,
    GATE: tl.constexpr,
    UNITS: tl.constexpr,
) -> 'tuple[Floats, Sum]':
    """Return the gradient of the query, and the sum that this target contributes to its keys."""
    high, first, second = total
    gradient = gradient.to(tl.float32)
    if KEY == 'relu2':
        query = query.to(tl.float32)
        grad_query = gradient * tl.where(query > 0, first, tl.where(query < 0, -second, 0.0))
        first, second = gradient * relu(query), gradient * relu(-query)
    else:
        inverse = 1.0 / denominator_of(second, UNITS) if KEY == 'softmax' else 1.0
        mean = first * inverse
        grad_query = gradient
        if GATE != 'none':
            grad_query = gradient * mean * gate_slope(query, GATE)
            gradient *= gate_value(query, GATE)
        first = gradient * inverse
        second = first * mean
    return grad_query, (-high, first, second)


@triton.jit
def add_target(total: 'Sum', target: 'Sum') -> 'Sum':
    """Add an earlier target to the sum; its `high` is never the lower one."""
    step = exp(total[0] - target[0])
    return target[0], total[1] * step + target[1], total[2] * step + target[2]


@triton.jit
def entry_pointer(
    x: 'Strided | None', batch: 'Ints', token: 'Ints', channel: 'Ints'
) -> 'Pointers | None':
    """Return the address of x[batch, token, channel], [B, T, D]; None for None.

    All are 64-bit, because channel · stride exceeds int32 in large channel-major tensors.
    """
    at = x
    if x is not None:
        at = x[0] + tl.cast(batch, tl.int64) * x[1] + tl.cast(token, tl.int64) * x[2]
        at += tl.cast(channel, tl.int64) * x[3]
    return at


@triton.jit
def store_row(
    x: 'Strided | None', at: 'Pointers | None', r: tl.constexpr, real: 'Bools', row: 'Floats'
) -> None:
    if x is not None:
        tl.store(at + r * x[2], row.to(x[0].dtype.element_ty), mask=real)


@triton.jit
def load_entry(
    x: 'Strided',
    batch: 'Ints',
    token: 'Ints',
    channel: 'Ints',
    real: 'Bools',
    other: tl.constexpr = 0.0,
) -> 'Floats':
    """Load x[batch, token, channel] in float32, in the shape of the broadcast indices."""
    return tl.load(entry_pointer(x, batch, token, channel), mask=real, other=other).to(tl.float32)


@triton.jit
def store_entry(
    x: 'Strided | None', batch: 'Ints', token: 'Ints', channel: 'Ints', real: 'Bools', row: 'Floats'
) -> None:
    store_row(x, entry_pointer(x, batch, token, channel), 0, real, row)


@triton.jit
def load_sum(sums: 'Strided', where: 'Place', real: 'Bools', other: tl.constexpr) -> 'Sum':
    """Load sums[:, batch, token, channel] of [3, B, T, D]; (other, 0, 0) where not `real`."""
    batch, token, channel = where
    at = sums[0] + batch * sums[2] + token * sums[3] + channel.to(tl.int64) * sums[4]
    high = tl.load(at, mask=real, other=other)
    first = tl.load(at + sums[1], mask=real, other=0.0)
    # Twice the stride may not fit into its type.
    return high, first, tl.load(at + sums[1] + sums[1], mask=real, other=0.0)


@triton.jit
def store_sum(sums: 'Strided | None', where: 'Place', real: 'Bools', total: 'Sum') -> None:
    if sums is not None:
        batch, token, channel = where
        at = sums[0] + batch * sums[2] + token * sums[3] + channel.to(tl.int64) * sums[4]
        tl.store(at, total[0], mask=real)
        tl.store(at + sums[1], total[1], mask=real)
        tl.store(at + sums[1] + sums[1], total[2], mask=real)


@triton.jit
def gate_value(query: 'Floats', GATE: tl.constexpr) -> 'Floats':
    query = query.to(tl.float32)
    if GATE == 'sigmoid':
        gate = tl.sigmoid(query)
    else:
        gate = relu(query)
    return gate


@triton.jit
def gate_slope(query: 'Floats', GATE: tl.constexpr) -> 'Floats':
    query = query.to(tl.float32)
    if GATE == 'sigmoid':
        gate = tl.sigmoid(query)
        slope = gate * (1 - gate)
    else:
        slope = tl.where(query > 0, 1.0, 0.0)
    return slope
