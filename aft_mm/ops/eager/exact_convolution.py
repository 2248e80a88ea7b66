"""AFT-conv for any finite key: kernel entry by kernel entry, every row with its own shift."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..geometry import kernel_offsets, past_kernel
from .sums import (
    Summable,
    Sums,
    leaf,
    lowest,
    mean,
    merge,
    move,
    prefix,
    sliding,
    suffix,
    total,
    transformed,
)

ENTRIES_AT_A_TIME = 8


def outside_sums(x: Summable, reach: Sequence[int], causal: bool, dim: int = 1) -> Summable:
    """Sums over the grid dimensions from `dim` on, outside of ``|Δ| ≤ reach`` in any of them.

    Splits the complement of the box into disjoint boxes, one dimension at a time; causal leaves
    only what comes earlier in raster order.
    """
    here = reach[0]
    beyond = x
    for later in range(dim + 1, dim + len(reach)):
        beyond = total(beyond, later)
    result = move(prefix(beyond, dim), here + 1, dim)
    if not causal:
        result = merge(result, move(suffix(beyond, dim), -here - 1, dim))
    if len(reach) > 1:
        inner = outside_sums(x, reach[1:], False, dim + 1)
        result = merge(result, sliding(inner, here, -1 if causal else here, dim))
        if causal:
            result = merge(result, outside_sums(x, reach[1:], True, dim + 1))
    return result


def exact_conv_mean(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
) -> Tensor:
    """``Σ W e^k v / Σ W e^k`` [B, T, D]: a pass over the kernel for the maximum, one to sum.

    The backward pass computes the terms of a few entries at a time anew, instead of keeping those
    of the whole kernel, but inside of torch.func, where checkpointing does not work.
    """
    heads, kernel = key.shape[-1], weight.shape[1:]
    key = key.unflatten(1, grid).unsqueeze(-1)
    value = value.unflatten(1, grid).unflatten(-1, (heads, -1))
    biases = weight.flatten(1).unsqueeze(-1).unbind(1)
    terms = list(zip(kernel_offsets(kernel), biases, strict=True))
    if causal:
        terms = [term for term, seen in zip(terms, past_kernel(kernel), strict=True) if seen]
    shift = torch.full_like(key, lowest(key.dtype)).detach()
    for offset, bias in terms:
        shift = torch.maximum(shift, _seen_at(key.detach(), offset, -torch.inf) + bias.detach())
    numerator, denominator = torch.zeros_like(value), torch.zeros_like(key)
    kept = transformed(key, value, weight)
    for start in range(0, len(terms), ENTRIES_AT_A_TIME):
        offsets, biases = zip(*terms[start : start + ENTRIES_AT_A_TIME], strict=True)
        entries, operands = partial(_sum_entries, offsets), (shift, key, value, *biases)
        if not kept:
            part = checkpoint(entries, *operands, use_reentrant=False)
        else:
            part = entries(*operands)
        numerator, denominator = numerator + part[0], denominator + part[1]
    result = Sums(shift, numerator, denominator)
    if global_connectivity:
        reach = [size // 2 for size in kernel]
        result = merge(result, outside_sums(leaf(key, value), reach, causal))
    return mean(result.numerator, result.denominator).flatten(-2).flatten(1, -2)


def _sum_entries(
    offsets: Sequence[tuple[int, ...]], shift: Tensor, key: Tensor, value: Tensor, *biases: Tensor
) -> tuple[Tensor, Tensor]:
    numerator, denominator = torch.zeros_like(value), torch.zeros_like(key)
    for offset, bias in zip(offsets, biases, strict=True):
        term = torch.exp(_seen_at(key, offset, -torch.inf) + bias - shift)
        numerator = numerator + term * _seen_at(value, offset, 0.0)
        denominator = denominator + term
    return numerator, denominator


def _seen_at(x: Tensor, offset: Sequence[int], fill: float) -> Tensor:
    """``y[t] = x[t + offset]`` on the grid dimensions (from 1 on), `fill` outside."""
    pad = [0, 0] * (x.dim() - 1 - len(offset))
    for step in reversed(offset):
        pad += [-step, step]
    return F.pad(x, pad, value=fill)
