import inspect
from collections.abc import Sequence
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Devices on which one product for several layers is faster, even if their weights are copied first.
FUSED_DEVICES = ('cuda',)


class ProjectedMemory(NamedTuple):
    """Keys and values [B, S, D] of a memory, and its mask [B, S], True = keep."""

    key: Tensor
    value: Tensor
    key_mask: Tensor | None


class FusedLinear(NamedTuple):
    """The weights of several linear layers in one tensor, and the output channels of each."""

    weight: Tensor
    bias: Tensor | None
    sizes: list[int]


def dropout(p: float) -> nn.Module:
    """Return dropout, for p = 0 the identity, which takes less time to call."""
    return nn.Dropout(p) if p else nn.Identity()


def fuse_linear(layers: Sequence[nn.Module]) -> FusedLinear | None:
    """Return the layers as one, or None if one has a hook or is no plain ``nn.Linear``."""
    linear = [layer for layer in layers if is_plain_linear(layer)]
    biases = [layer.bias for layer in linear if layer.bias is not None]
    if len(linear) < len(layers) or len(biases) not in (0, len(linear)):
        return None
    weights = [layer.weight for layer in linear]
    # Single rows are multiplied faster in a column-major layout.
    if all(weight.t().is_contiguous() for weight in weights):
        weight = torch.cat([weight.t() for weight in weights], 1).t()
    else:
        weight = torch.cat(tuple(weights))
    bias = torch.cat(tuple(biases)) if biases else None
    return FusedLinear(weight, bias, [layer.out_features for layer in linear])


def apply_fused(fused: FusedLinear, x: Tensor) -> tuple[Tensor, ...]:
    """Return the output of each layer for x [..., D], from one matrix product."""
    parts: tuple[Tensor, ...] = F.linear(x, fused.weight, fused.bias).split(fused.sizes, -1)
    return parts


def project_channel_major(layer: nn.Linear | FusedLinear, x: Tensor) -> Tensor:
    """Return ``layer(x)`` of x [B, T, D] with strides (T, 1, B·T), by a product that copies nothing."""
    weight, flat = layer.weight, x.reshape(-1, x.shape[2]).t()
    if layer.bias is None:
        y = torch.mm(weight, flat)
    else:
        y = torch.addmm(layer.bias.unsqueeze(1), weight, flat)
    return y.view(len(weight), *x.shape[:2]).movedim(0, 2)


def project_tokens(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return ``layer(x)``, contiguous, of x [B, T, D] in the order of :func:`project_channel_major`."""
    flat = x.movedim(2, 0).reshape(x.shape[2], -1).t()
    if layer.bias is None:
        y = torch.mm(flat, layer.weight.t())
    else:
        y = torch.addmm(layer.bias, flat, layer.weight.t())
    return y.view(*x.shape[:2], len(layer.weight))


def is_plain_linear(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether a layer is exactly an ``nn.Linear`` that nothing observes or changes."""
    return type(layer) is nn.Linear and not has_hooks(layer)


def has_hooks(layer: nn.Module) -> bool:
    forward = layer._forward_hooks or layer._forward_pre_hooks
    return bool(forward or layer._backward_hooks or layer._backward_pre_hooks)


def argument_names(layer: nn.Module, base: type[nn.Module]) -> list[str]:
    classes = (cls for cls in type(layer).__mro__ if issubclass(cls, base))
    parameters = (p for cls in classes for p in inspect.signature(cls.__init__).parameters.values())
    names = dict.fromkeys(p.name for p in parameters if p.kind is not p.VAR_KEYWORD)
    return [name for name in names if name != 'self']
