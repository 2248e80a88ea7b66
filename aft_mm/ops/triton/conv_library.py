"""AFT-conv of the Triton backend: which calls the kernels are exact for, and their operators."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..eager.convolution import crop_kernel
from ..eager.mixing import apply_gate, hide, safe_conv_mean
from ..eager.sums import FAST_BIAS_SPREAD, choose
from . import conv_launch as launch
from .common import once
from .register import differentiated


def aft_conv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """AFT-conv [B, T, D] on a 1-d or 2-d grid, not causal, with global connectivity.

    By the kernels if the weights and 0 spread over at most FAST_BIAS_SPREAD, whatever the keys;
    beyond it, or with a weight that is not finite, by the safe path of the eager backend. The check
    reads the weights alone; as in eager it waits for the device.
    """
    if len(grid) == 1:
        grid, weight = (1, *grid), weight.unsqueeze(1)
    weight = crop_kernel(weight, grid)
    save = differentiated(query, key, value, weight)

    def fast(key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        return conv(query, key, value, weight, key_mask, grid, gate, save)[0]

    def safe(key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        dtype = value.dtype
        key, value = hide(key, value, key_mask)
        weight = weight.to(key.dtype)
        mixed = safe_conv_mean(key, value, weight, grid, global_connectivity, causal)
        return apply_gate(query, mixed, gate, dtype)

    bias = weight.detach().float()
    fits = bias.amax().clamp_min(0) - bias.amin().clamp_max(0) <= FAST_BIAS_SPREAD
    return choose(fits, fast, safe, key, value, weight)


@torch.library.custom_op('aft_mm::conv', mutates_args=())
def conv(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    key_mask: Tensor | None,
    grid: Sequence[int],
    gate: str,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """AFT-conv [B, T, D] on a 2-d grid, and with `save` what its gradient needs."""
    return launch.conv_forward(query, key, value, weight, key_mask, grid, gate, save)


@torch.library.custom_op('aft_mm::conv_backward', mutates_args=())
def conv_backward(
    gradient: Tensor,
    sums: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    key_mask: Tensor | None,
    grid: Sequence[int],
    gate: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query (nothing without one), key, value and weight."""
    by_query, *others = launch.conv_backward(
        gradient, sums, query, key, value, weight, key_mask, grid, gate
    )
    return key.new_empty(0) if by_query is None else by_query, *others


@conv.register_fake
def _(query, key, value, weight, key_mask, grid, gate, save):
    parts = launch.cut(value.shape[2], weight.shape[1:], grid)
    sums = launch.new_pair(value.shape[0] if save else 0, parts, value)
    return value.new_empty(value.shape), sums


@conv_backward.register_fake
def _(gradient, sums, query, key, value, weight, key_mask, grid, gate):
    by_query = key.new_empty(0) if query is None else query.new_empty(query.shape)
    return by_query, *(x.new_empty(x.shape) for x in (key, value, weight))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.grid, ctx.gate, ctx.save = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, gradient: Tensor | None, _):
    if gradient is None:
        return (None,) * 8
    if not ctx.save:
        raise RuntimeError('aft_mm::conv must be called with save=True for its gradient')
    by_query, *others = conv_backward(gradient, *ctx.saved_tensors, ctx.grid, ctx.gate)
    by_query = None if ctx.saved_tensors[1] is None else by_query
    return by_query, *others, None, None, None, None


conv.register_autograd(_backward, setup_context=_setup_context)
conv_backward.register_autograd(once('aft_conv'))
