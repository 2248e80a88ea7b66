"""AFT-conv on a CPU without a gradient: the difference form, a few samples at a time.

One convolution serves numerator and denominator, and memory that was just used is used again: to
get fresh pages from the system costs more than most operations. Of bfloat16 tokens the convolution
multiplies bfloat16 numbers where the CPU can, adds up in float32 and rounds its sums once; the sums
over all tokens, the quotient and the gate are rounded nowhere (docs/ops.md).
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from . import decisions
from .convolution import convolve, with_fast_columns
from .sums import column_shift, transformed
from .tokens import apply_gate, hide

# Of terms that a thread convolves; fewer cost more calls, more cost memory.
NUMBERS_AT_A_TIME = 2**19
# Beyond this bias the sums of the kernel, which are rounded, outweigh those over all tokens.
LARGEST_ROUNDED_BIAS = 3.0


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
    batch, tokens, channels = value.shape
    at_a_time = torch.get_num_threads() * NUMBERS_AT_A_TIME
    turns = min(batch, math.ceil(batch * tokens * len(weight) / at_a_time))
    result = value.new_empty(value.shape)
    for turn in range(turns):
        part = slice(turn * batch // turns, (turn + 1) * batch // turns)
        hidden = None if key_mask is None else key_mask[part]
        mixed = _mean(*hide(key[part], value[part], hidden), weight, grid)
        gating = None if query is None else query[part]
        result[part] = apply_gate(gating, mixed, gate, value.dtype)
    return result


def _mean(key: Tensor, value: Tensor, weight: Tensor, grid: Sequence[int]) -> Tensor:
    """``Σ W e^k v / Σ W e^k`` [B, T, D], on top of memory that nobody else holds."""
    channels, heads = value.shape[2], key.shape[2]
    exp_key = torch.exp_(key - column_shift(key, 1))
    weighted = (exp_key.unsqueeze(-1) * value.unflatten(-1, (heads, -1))).flatten(2)
    terms = torch.cat([weighted, exp_key], -1)
    everything = torch.cat([x.sum(1, keepdim=True) for x in (weighted, exp_key)], -1)
    # Where every key is hidden, 0 is to be divided by something.
    everything[..., channels:].clamp_min_(torch.finfo(key.dtype).tiny)
    convolved = convolve(terms.to(weight.dtype).unflatten(1, grid), weight).flatten(1, -2)
    sums = convolved.to(key.dtype).add_(everything)
    mixed = sums[..., :channels]
    mixed.unflatten(-1, (heads, -1)).div_(sums[..., channels:].unsqueeze(-1))
    return mixed


def difference_kernel(given: Tensor, weight: Tensor, value: Tensor) -> Tensor:
    """``e^w − 1`` for every channel of value, then of the keys, [D + h, *K], as it is convolved.

    It is kept where `given`, of which weight is the part that reaches a token, is a constant.
    """
    channels, heads = value.shape[2], len(weight)
    may_round = value.dtype == torch.bfloat16 and multiplies_bfloat16()

    def make() -> Tensor:
        kernel = with_fast_columns(torch.expm1(weight))
        if may_round and weight.amax() <= LARGEST_ROUNDED_BIAS:
            kernel = kernel.bfloat16()
        return torch.cat([kernel.repeat_interleave(channels // heads, 0), kernel])

    name = 'differences', channels, may_round, weight.dtype, weight.shape
    return decisions.derived(given, name, make)


@cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU has products of bfloat16, which oneDNN adds up in float32."""
    asked = getattr(torch.cpu, '_is_avx512_bf16_supported', None)
    return torch.backends.mkldnn.is_available() and asked is not None and asked()
