"""AFT-conv on a CPU without a gradient: the difference form, a few samples at a time.

Memory that was just used is used again: to get fresh pages from the system costs more than most
operations, and the kernel is prepared once. Of bfloat16 tokens, too, everything is float32: what a
convolution of bfloat16 numbers gains the conversions lose.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from . import decisions
from .convolution import convolve, with_fast_columns
from .sums import column_shift, transformed
from .tokens import apply_gate, hide

# Of terms that a thread convolves; fewer cost more calls, more cost memory.
NUMBERS_AT_A_TIME = 2**20


def serves(*tensors: Tensor | None) -> bool:
    """Whether query, key, value and weight are plain tensors on a CPU and nobody looks on."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if decisions.recording() or decisions.repeating():
        return False
    given = [x for x in tensors if x is not None]
    return all(x.device.type == 'cpu' for x in given) and not transformed(*given)


def gated_mean(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """``g(q) Σ W e^k v / Σ W e^k`` [B, T, D], W = 1 outside of the kernel.

    weight is that of :func:`difference_kernel`.
    """
    batch, tokens, _ = value.shape
    at_a_time = torch.get_num_threads() * NUMBERS_AT_A_TIME
    turns = min(batch, math.ceil(batch * tokens * len(weight) / at_a_time))
    if turns == 1:
        mixed = _mean(*hide(key, value, key_mask), weight, grid)
        return apply_gate(query, mixed, gate, value.dtype)
    result = value.new_empty(value.shape)
    for turn in range(turns):
        part = slice(turn * batch // turns, (turn + 1) * batch // turns)
        hidden = None if key_mask is None else key_mask[part]
        mixed = _mean(*hide(key[part], value[part], hidden), weight, grid)
        gating = None if query is None else query[part]
        result[part] = apply_gate(gating, mixed, gate, mixed.dtype)
    return result


def _mean(key: Tensor, value: Tensor, weight: Tensor, grid: Sequence[int]) -> Tensor:
    """``Σ W e^k v / Σ W e^k`` [B, T, D], on top of memory that nobody else holds."""
    channels, heads = value.shape[2], key.shape[2]
    exp_key = torch.exp_(key - column_shift(key, 1))
    weighted = exp_key.unsqueeze(-1) * value.unflatten(-1, (heads, -1))
    sums = []
    for x, kernel in ((weighted.flatten(2), weight[:channels]), (exp_key, weight[channels:])):
        everything = x.sum(1, keepdim=True)
        if x is exp_key:  # where every key is hidden, 0 is to be divided by something
            everything.clamp_min_(torch.finfo(key.dtype).tiny)
        sums.append(convolve(x.unflatten(1, grid), kernel).flatten(1, -2).add_(everything))
    mixed, normalizer = sums
    mixed.unflatten(-1, (heads, -1)).div_(normalizer.unsqueeze(-1))
    return mixed


def difference_kernel(given: Tensor, weight: Tensor, value: Tensor) -> Tensor:
    """``e^w − 1`` for every channel of value, then of the keys, [D + h, *K], as it is convolved.

    It is kept where `given`, of which weight is the part that reaches a token, is a constant.
    """
    channels, heads = value.shape[2], len(weight)

    def make() -> Tensor:
        kernel = with_fast_columns(torch.expm1(weight))
        return torch.cat([kernel.repeat_interleave(channels // heads, 0), kernel])

    return decisions.derived(given, ('differences', channels, weight.dtype, weight.shape), make)
