"""Helpers of the token mixers: fused projections, hidden tokens, checks of arguments."""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import refuse
from aft_mm.ops.checks import FLOATS, check_mask

__all__ = [
    'FusedLinear',
    'ProjectedMemory',
    'apply_fused',
    'argument_names',
    'check_tokens',
    'fuse_linear',
    'hide_tokens',
]


class ProjectedMemory(NamedTuple):
    """Keys and values [B, S, D] of a memory, and its mask [B, S], True = keep."""

    key: Tensor
    value: Tensor
    key_mask: Tensor | None


class FusedLinear(NamedTuple):
    """Copies of the weights of several linear layers, and the output channels of each layer."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]


def fuse_linear(layers: Sequence[nn.Module]) -> FusedLinear | None:
    """Return the layers as one, or None if one has a hook or is not a plain ``nn.Linear``."""
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in linear)
    biases = [layer.bias for layer in linear if layer.bias is not None]
    if hooks or len(linear) < len(layers) or len(biases) not in (0, len(linear)):
        return None
    weights = [layer.weight for layer in linear]
    # Keep a column-major layout: the product of a single row with the matrix is faster in it.
    if all(weight.t().is_contiguous() for weight in weights):
        weight = torch.cat([weight.t() for weight in weights], 1).t()
    else:
        weight = torch.cat(tuple(weights))
    bias = torch.cat(tuple(biases)).detach() if biases else None
    return FusedLinear(weight.detach(), bias, [layer.out_features for layer in linear])


def apply_fused(fused: FusedLinear, x: Tensor) -> tuple[Tensor, ...]:
    """Return the output of each layer for x [..., D], from one matrix product."""
    return F.linear(x, fused.weight, fused.bias).split(fused.sizes, -1)


def hide_tokens(x: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return x [B, T, D] with hidden tokens set to 0, as 0 · NaN would reach the gradients.

    Raises:
        ValueError: `key_mask` is not a bool tensor [B, T].
    """
    if key_mask is None:
        return x
    check_mask(key_mask, x)
    return x.masked_fill(~key_mask.unsqueeze(-1), 0)


def check_tokens(name: str, x: Tensor, *shape: str | int) -> None:
    """Raise ValueError unless x is a float tensor of this shape, such as ('B', 'T', 192)."""
    floats = isinstance(x, Tensor) and x.dtype in FLOATS
    if not floats or x.dim() != len(shape) or x.shape[-1] != shape[-1]:
        refuse(name, f'a tensor of floats [{", ".join(map(str, shape))}]', x)


def argument_names(layer: nn.Module, base: type[nn.Module]) -> str:
    """Return the arguments of the constructors from the layer's class up to `base`."""
    classes = (cls for cls in type(layer).__mro__ if issubclass(cls, base))
    parameters = (p for cls in classes for p in inspect.signature(cls.__init__).parameters.values())
    names = dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    return ', '.join(name for name in names if name != 'self')
