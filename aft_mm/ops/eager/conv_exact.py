"""AFT-conv for any finite key: entry by entry of the kernel, every row with its own shift.

Inside, key is [B, *grid, h, 1], value [B, *grid, h, D/h], and an entry of w [h, 1].
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..geometry import kernel_offsets
from ..online_softmax import (
    ShiftedSum,
    Summable,
    add,
    from_token,
    lowest,
    mean,
    prefix_sum,
    shift,
    sliding_sum,
    suffix_sum,
    total,
)
from ..tracing import clipped, transformed

ENTRIES_AT_ONCE = 8


def outside_sums(x: Summable, reach: Sequence[int], causal: bool, dim: int = 1) -> Summable:
    """Return the sums over the grid dimensions from `dim` on, outside the box ``|Δ| ≤ reach``."""
    here = reach[0]
    lines = x
    for later in range(dim + 1, dim + len(reach)):
        lines = total(lines, later)
    result = shift(prefix_sum(lines, dim), here + 1, dim)
    if not causal:
        result = add(result, shift(suffix_sum(lines, dim), -here - 1, dim))
    if len(reach) > 1:
        inner = outside_sums(x, reach[1:], False, dim + 1)
        result = add(result, sliding_sum(inner, here, -1 if causal else here, dim))
        if causal:
            result = add(result, outside_sums(x, reach[1:], True, dim + 1))
    return result


def exact_conv_mean(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
) -> Tensor:
    """Return ``Σ W e^k v / Σ W e^k`` [B, T, D], computed in float64.

    One pass finds the largest key, one the sums. The backward pass recomputes the terms, except
    inside torch.func.
    """
    dtype = key.dtype
    key, value, weight = (x.double() for x in (key, value, weight))
    heads, kernel = key.shape[-1], weight.shape[1:]
    key = key.unflatten(1, grid).unsqueeze(-1)
    value = value.unflatten(1, grid).unflatten(-1, (heads, -1))
    biases = weight.flatten(1).unsqueeze(-1).unbind(1)
    entries = list(zip(kernel_offsets(kernel), biases, strict=True))
    if causal:  # in raster order the centre is the last
        entries = entries[: len(entries) // 2 + 1]
    largest = torch.full_like(key, lowest(key.dtype)).detach()
    for offset, bias in entries:
        seen = key.detach().masked_fill(bias == -torch.inf, -torch.inf)
        largest = torch.maximum(largest, _at_offset(seen, offset, -torch.inf))
    numerator, denominator = torch.zeros_like(value), torch.zeros_like(key)
    save_all = transformed()
    for start in range(0, len(entries), ENTRIES_AT_ONCE):
        offsets, biases = zip(*entries[start : start + ENTRIES_AT_ONCE], strict=True)
        sum_entries, operands = partial(_sum_entries, offsets), (largest, key, value, *biases)
        if save_all:
            part = sum_entries(*operands)
        else:
            part = checkpoint(sum_entries, *operands, use_reentrant=False)
        numerator, denominator = numerator + part[0], denominator + part[1]
    result = ShiftedSum(largest, numerator, denominator)
    if global_connectivity:
        reach = [size // 2 for size in kernel]
        result = add(result, outside_sums(from_token(key, value), reach, causal))
    return mean(result.numerator, result.denominator).flatten(-2).flatten(1, -2).to(dtype)


def _sum_entries(
    offsets: Sequence[tuple[int, ...]], largest: Tensor, key: Tensor, value: Tensor, *biases: Tensor
) -> tuple[Tensor, Tensor]:
    numerator, denominator = torch.zeros_like(value), torch.zeros_like(key)
    for offset, bias in zip(offsets, biases, strict=True):
        # One exponential: that of a pair hidden by a bias of −∞ alone may be ∞.
        term = torch.exp(_at_offset(key, offset, -torch.inf) - largest + bias)
        numerator = numerator + term * _at_offset(value, offset, 0.0)
        denominator = denominator + term
    return numerator, denominator


def _at_offset(x: Tensor, offset: Sequence[int], fill: float) -> Tensor:
    """Return ``y[t] = x[t + offset]`` on the grid dimensions, `fill` outside."""
    amounts = [0, 0] * (x.dim() - 1 - len(offset))
    for dim in range(len(offset), 0, -1):
        step, length = offset[dim - 1], x.shape[dim]
        if isinstance(length, int):  # while paths are recorded, kernels may be larger than grids
            step = clipped(step, length)
        amounts += [-step, step]
    return F.pad(x, amounts, value=fill)
