"""The torch.library boundary: operations that torch.compile must not look into.

The safe path of the convolution takes thousands of small operations for a large kernel: traced,
they would make a graph that takes minutes to compile, for a path that is hardly ever taken.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .convolution import safe_mean


@torch.library.custom_op('aft_mm::safe_conv_mean', mutates_args=())
def opaque_safe_mean(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
) -> Tensor:
    """:func:`safe_mean` as one node of a graph."""
    return safe_mean(key, value, weight, grid, global_connectivity, causal)


@torch.library.custom_op('aft_mm::safe_conv_mean_backward', mutates_args=())
def _opaque_safe_mean_backward(
    gradient: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # An operator runs below autograd; torch.func differentiates there all the same.
    def forward(key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
        return safe_mean(key, value, weight, grid, global_connectivity, causal)

    return torch.func.vjp(forward, key, value, weight)[1](gradient)


@opaque_safe_mean.register_fake
def _(key, value, weight, grid, global_connectivity, causal):
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@_opaque_safe_mean_backward.register_fake
def _(gradient, key, value, weight, grid, global_connectivity, causal):
    return tuple(map(torch.empty_like, (key, value, weight)))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _backward(ctx, gradient: Tensor):
    return *_opaque_safe_mean_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None


opaque_safe_mean.register_autograd(_backward, setup_context=_setup_context)
