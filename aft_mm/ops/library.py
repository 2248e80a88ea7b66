"""The torch.library boundary: operations that torch.compile must not look into.

The exact convolution takes thousands of small operations for a large kernel: traced, they would
make a graph that takes minutes to compile, for a path that is hardly ever taken.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .conv_exact import exact_conv_mean


def exact_conv(key: Tensor, value: Tensor, weight: Tensor, *options) -> Tensor:
    """:func:`exact_conv_mean` in float64, returned in the type of value."""
    doubles = (part.double() for part in (key, value, weight))
    return exact_conv_mean(*doubles, *options).to(value.dtype)


@torch.library.custom_op('aft_mm::exact_conv', mutates_args=())
def opaque_exact_conv(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
) -> Tensor:
    """:func:`exact_conv` as one node of a graph."""
    return exact_conv(key, value, weight, grid, global_connectivity, causal)


@torch.library.custom_op('aft_mm::exact_conv_backward', mutates_args=())
def _exact_conv_backward(
    gradient: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    # An operator runs below autograd; torch.func differentiates there all the same.
    def forward(*leaves: Tensor) -> Tensor:
        return exact_conv(*leaves, grid, global_connectivity, causal)

    return torch.func.vjp(forward, key, value, weight)[1](gradient)


@opaque_exact_conv.register_fake
def _(key, value, weight, grid, global_connectivity, causal):
    return torch.empty_like(value, memory_format=torch.contiguous_format)


@_exact_conv_backward.register_fake
def _(gradient, key, value, weight, grid, global_connectivity, causal):
    return tuple(map(torch.empty_like, (key, value, weight)))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _backward(ctx, gradient: Tensor):
    return *_exact_conv_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None


opaque_exact_conv.register_autograd(_backward, setup_context=_setup_context)
