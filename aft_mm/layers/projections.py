"""Helpers of the token mixers."""

import inspect
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    'FusedLinear',
    'ProjectedMemory',
    'apply_fused',
    'argument_names',
    'dropout',
    'fuse_linear',
]


class ProjectedMemory(NamedTuple):
    """Keys and values [B, S, D] of a memory, and its mask [B, S], True = keep."""

    key: Tensor
    value: Tensor
    key_mask: Tensor | None


class FusedLinear(NamedTuple):
    """Copies of the weights of several linear layers, and the output channels of each."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]


def dropout(p: float) -> nn.Module:
    """Return dropout, for p = 0 the identity, which takes less time to call."""
    return nn.Dropout(p) if p else nn.Identity()


def fuse_linear(layers: Sequence[nn.Module]) -> FusedLinear | None:
    """Return the layers as one, or None if one has a hook or is no plain ``nn.Linear``."""
    linear = [layer for layer in layers if type(layer) is nn.Linear]
    hooks = any(layer._forward_hooks or layer._forward_pre_hooks for layer in linear)
    biases = [layer.bias for layer in linear if layer.bias is not None]
    if hooks or len(linear) < len(layers) or len(biases) not in (0, len(linear)):
        return None
    weights = [layer.weight for layer in linear]
    # Single rows are multiplied faster in a column-major layout.
    if all(weight.t().is_contiguous() for weight in weights):
        weight = torch.cat([weight.t() for weight in weights], 1).t()
    else:
        weight = torch.cat(tuple(weights))
    bias = torch.cat(tuple(biases)).detach() if biases else None
    return FusedLinear(weight.detach(), bias, [layer.out_features for layer in linear])


def apply_fused(fused: FusedLinear, x: Tensor) -> tuple[Tensor, ...]:
    """Return the output of each layer for x [..., D], from one matrix product."""
    return F.linear(x, fused.weight, fused.bias).split(fused.sizes, -1)


def argument_names(layer: nn.Module, base: type[nn.Module]) -> str:
    """Return the arguments of the constructors up to `base`."""
    classes = (cls for cls in type(layer).__mro__ if issubclass(cls, base))
    parameters = (p for cls in classes for p in inspect.signature(cls.__init__).parameters.values())
    names = dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    return ', '.join(name for name in names if name != 'self')
