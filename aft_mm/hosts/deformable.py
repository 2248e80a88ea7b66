import math
from collections.abc import Callable, Sequence
from importlib import import_module

import torch
from torch import Tensor
from torch.autograd.functional import vjp
from torchvision.ops import deform_conv2d


def add_gradients(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    grad_output: Tensor,
    totals: Sequence[Tensor],
) -> None:
    """Add the gradient of each input of a function to its total, in place."""
    for total, gradient in zip(totals, vjp(function, inputs, grad_output)[1], strict=True):
        total += gradient


def wide(x: Tensor) -> Tensor:
    """Return x in float32 or wider; torchvision has few kernels for half precision on CPUs."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _deform_conv2d(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Sequence[tuple[int, int]],
    mask: Tensor | None = None,
) -> Tensor:
    """torchvision's deformable convolution; outputs whose offset is NaN are NaN."""
    lost, dtype = offset.isnan(), input.dtype
    offset = offset.masked_fill(lost, 0)
    input, offset, weight = wide(input), wide(offset), wide(weight)
    if offset.requires_grad:
        pairs = offset.unflatten(1, (-1, *weight.shape[2:], 2)).movedim(4, -1)
        size = torch.tensor(input.shape[2:], device=input.device)
        pairs = _without_outer_gradient(pairs, _positions(pairs, geometry), size)
        offset = pairs.movedim(-1, 4).flatten(1, 4)
    bias, mask = (None if x is None else wide(x) for x in (bias, mask))
    output = deform_conv2d(input, offset, weight, bias, *geometry, mask).to(dtype)
    return output.masked_fill(lost.any(1, keepdim=True), math.nan)


def _positions(offset: Tensor, geometry: Sequence[tuple[int, int]]) -> Tensor:
    axes = []
    for axis, (stride, padding, dilation) in enumerate(zip(*geometry, strict=True)):
        taps = torch.arange(offset.shape[2 + axis], device=offset.device) * dilation - padding
        places = torch.arange(offset.shape[4 + axis], device=offset.device) * stride
        axes.append(taps[:, None] + places)
    y, x = torch.broadcast_tensors(axes[0][:, None, :, None], axes[1][None, :, None])
    return offset + torch.stack((y, x), -1)


def _without_outer_gradient(places: Tensor, positions: Tensor, size: Tensor) -> Tensor:
    """Return places [..., 2] that get no gradient where positions [px] are outside of a map's size.

    In mmcv a position at exactly −1, where offsets of 0 lead, is outside; in torch the pixel at 0
    gives it a slope.
    """
    inside = ((positions > -1) & (positions < size)).all(-1, keepdim=True)
    return torch.where(inside, places, places.detach())


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    **options: int,
) -> None:
    """Deformable convolution v1; input [B, C, H, W], offset [B, 2 · groups · kH · kW, H', W']."""
    output.copy_(_deform_conv2d(input, offset, weight, None, _geometry(options)))


def _geometry(options: dict[str, int]) -> list[tuple[int, int]]:
    return [(options[f'{name}H'], options[f'{name}W']) for name in ('d', 'pad', 'dilation')]


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    weight: Tensor,
    columns: Tensor,
    **options: int,
) -> None:
    def forward(input: Tensor, offset: Tensor) -> Tensor:
        return _deform_conv2d(input, offset, weight, None, _geometry(options))

    add_gradients(forward, (input, offset), grad_output, (grad_input, grad_offset))


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_weight: Tensor,
    columns: Tensor,
    ones: Tensor,
    *,
    scale: float,
    **options: int,
) -> None:
    """Add `scale` times the gradient of the weight of :func:`deform_conv_forward`."""

    def forward(weight: Tensor) -> Tensor:
        return _deform_conv2d(input, offset, weight, None, _geometry(options))

    grad_weight += scale * vjp(forward, grad_weight, grad_output)[1]


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    *,
    with_bias: bool,
    **options: int,
) -> None:
    """Deformable convolution v2: samples are multiplied by mask [B, groups · kH · kW, H', W'].

    Of a larger offset or mask, as in DyHead, the first numbers of each image are read as if it had
    the size of the output, as in mmcv.
    """
    places = _modulated_geometry(options)
    offset, mask = (_first_numbers(x, output.shape[2:]) for x in (offset, mask))
    output.copy_(_deform_conv2d(input, offset, weight, bias if with_bias else None, places, mask))


def _first_numbers(x: Tensor, size: Sequence[int]) -> Tensor:
    count = x.shape[1] * math.prod(size)
    numbers = x.flatten(1)
    if numbers.shape[1] < count:  # torchvision refuses a smaller one
        return x
    return numbers[:, :count].unflatten(1, (x.shape[1], *size))


def _modulated_geometry(options: dict[str, int]) -> list[tuple[int, int]]:
    return [(options[f'{name}_h'], options[f'{name}_w']) for name in ('stride', 'pad', 'dilation')]


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    *,
    with_bias: bool,
    **options: int,
) -> None:
    places = _modulated_geometry(options)

    def forward(input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor) -> Tensor:
        offset, mask = (_first_numbers(x, grad_output.shape[2:]) for x in (offset, mask))
        return _deform_conv2d(input, offset, weight, None, places, mask)

    totals = grad_input, grad_weight, grad_offset, grad_mask
    add_gradients(forward, (input, weight, offset, mask), grad_output, totals)
    if with_bias:
        grad_bias += grad_output.sum((0, 2, 3))


def _deformable_attention(
    value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    attend = import_module('mmcv.ops.multi_scale_deform_attn').multi_scale_deformable_attn_pytorch
    dtype = value.dtype
    value, locations, weights = wide(value), wide(locations), wide(weights)
    if locations.requires_grad:
        sizes = shapes.flip(1).unsqueeze(1)  # width and height of each level, [levels, 1, 2]
        locations = _without_outer_gradient(locations, locations * sizes - 0.5, sizes)
    result: Tensor = attend(value, shapes.tolist(), locations, weights)
    return result.to(dtype)


def ms_deform_attn_forward(
    value: Tensor,
    shapes: Tensor,
    level_start_index: Tensor,
    locations: Tensor,
    weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """Multi-scale deformable attention (arXiv 2010.04159, eq. 3).

    Args:
        value: [B, keys, h, C], all levels one after another.
        shapes: [levels, 2], height and width of each.
        locations: [B, queries, h, levels, points, 2], x and y in 0 … 1.
        weights: [B, queries, h, levels, points].

    Returns:
        [B, queries, h · C].
    """
    return _deformable_attention(value, shapes, locations, weights)


def ms_deform_attn_backward(
    value: Tensor,
    shapes: Tensor,
    level_start_index: Tensor,
    locations: Tensor,
    weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_locations: Tensor,
    grad_weights: Tensor,
    im2col_step: int,
) -> None:
    def forward(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return _deformable_attention(value, shapes, locations, weights)

    totals = grad_value, grad_locations, grad_weights
    add_gradients(forward, (value, locations, weights), grad_output, totals)
