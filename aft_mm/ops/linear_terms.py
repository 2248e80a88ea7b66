from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from aft_mm.checks import check_choice

from .tracing import may_read

FeatureMap = Callable[[Tensor], Tensor]
Maps = str | FeatureMap | tuple[FeatureMap, FeatureMap]
Map = TypeVar('Map', bound=Callable[..., Any])


class LinearState(NamedTuple):
    """``s = Σ φ(k) vᵀ`` and ``z = Σ φ(k)`` as columns of sums [B, h, d, m + 1]; next index [B]."""

    sums: Tensor
    position: Tensor

    @property
    def s(self) -> Tensor:
        return self.sums[..., :-1]

    @property
    def z(self) -> Tensor:
        return self.sums[..., -1]


def never_negative(function: Map) -> Map:
    """Mark a feature map as never negative, so that it is not checked."""
    vars(function).update(is_never_negative=True)
    return function


@never_negative
def elu(x: Tensor) -> Tensor:
    """``elu(x) + 1``; torch's ``e^x − 1 + 1`` would round small features to 0."""
    return x.clamp_max(0).exp() + x.relu()


@never_negative
def relu(x: Tensor) -> Tensor:
    return torch.relu(x)


@never_negative
def square(x: Tensor) -> Tensor:
    return x.square()


FEATURE_MAPS: dict[str, FeatureMap] = {'elu': elu, 'relu': relu, 'square': square}


def resolve(feature_map: Maps) -> tuple[FeatureMap, FeatureMap]:
    if isinstance(feature_map, str):
        check_choice('feature_map', feature_map, tuple(FEATURE_MAPS))
        feature_map = FEATURE_MAPS[feature_map]
    return feature_map if isinstance(feature_map, tuple) else (feature_map, feature_map)


def features(function: FeatureMap, x: Tensor) -> Tensor:
    """Return φ(x). On a CPU a negative one raises ValueError: weights could sum to 0."""
    mapped = function(x)
    if getattr(function, 'is_never_negative', False) or not may_read(mapped):
        return mapped
    if mapped.device.type == 'cpu' and (mapped.detach() < 0).any():
        raise ValueError(
            f'feature_map must not be negative, got {float(mapped.detach().min()):.3g} from '
            f'{getattr(function, "__name__", function)!r}'
        )
    return mapped
