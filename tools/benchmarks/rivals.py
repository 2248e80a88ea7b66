"""Other implementations that are timed with the backends: other forms, and other packages.

Only rivals that compute the same sum as the op are compared with the oracle.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKAGES = {'timm': 'timm', 'aft-pytorch': 'aft_pytorch'}
HEAD_CHANNELS = 64


def missing(package: str | None) -> str | None:
    if package is None or importlib.util.find_spec(PACKAGES[package]) is not None:
        return None
    return f'{package} is not installed: pip install {package}'


@dataclass(frozen=True)
class Rival:
    """Another implementation: `make(tensors, options)` returns the function to time."""

    make: Callable[[Sequence[Tensor], dict], Callable[..., Tensor]]
    same_sum: bool = False
    package: str | None = None

    @property
    def lacks(self) -> str | None:
        return missing(self.package)


def dense_local(query, key, value, pos_u, pos_v, *, window: int, **ignored) -> Tensor:
    token = torch.arange(key.shape[1], device=key.device)
    distance = token[:, None] - token
    bias = (pos_u @ pos_v.T).masked_fill(distance >= window, 0)
    weight = torch.exp(bias.masked_fill(distance < 0, -torch.inf))
    exp_key = torch.exp(key - key.amax(1, keepdim=True))
    weight = weight.to(value.dtype)  # of float32 factors
    return torch.sigmoid(query) * (weight @ (exp_key * value)) / (weight @ exp_key)


def _softmax(causal: bool) -> Callable:
    def make(tensors: Sequence[Tensor], options: dict) -> Callable[..., Tensor]:
        query, key = tensors[:2]
        heads = max(1, query.shape[2] // HEAD_CHANNELS)
        # AFT-conv has only one key channel per head.
        full_key = None if key.shape == query.shape else torch.randn_like(query)

        def attend(query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor) -> Tensor:
            inputs = (query, key if full_key is None else full_key, value)
            split = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in inputs)
            mixed = F.scaled_dot_product_attention(*split, is_causal=causal)
            return mixed.transpose(1, 2).flatten(2)

        return attend

    return make


def _depthwise(tensors: Sequence[Tensor], options: dict) -> Callable[..., Tensor]:
    channels, kernel = tensors[2].shape[2], tensors[3].shape[1:]
    filters = torch.randn(channels, 1, *kernel, device=tensors[2].device)

    def convolve(query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor) -> Tensor:
        image = value.transpose(1, 2).unflatten(2, options['grid'])
        mixed = F.conv2d(image, filters.to(value), padding='same', groups=channels)
        return mixed.flatten(2).transpose(1, 2)

    return convolve


def _linear(tensors: Sequence[Tensor], options: dict) -> Callable[..., Tensor]:
    channels = tensors[2].shape[2]
    weight = torch.randn(channels, channels, device=tensors[2].device)
    return lambda query, key, value, *parameters: F.linear(value, weight.to(value))


class _Given(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.given


def _aft_pytorch(name: str) -> Callable:
    """Return a module of aft-pytorch 0.2 without its projections; its AFTFull is not causal."""

    def make(tensors: Sequence[Tensor], options: dict) -> Callable[..., Tensor]:
        import aft_pytorch

        batch, tokens, channels = tensors[0].shape
        module = getattr(aft_pytorch, name)(tokens, channels, channels).to(tensors[0])
        module.to_q, module.to_k, module.to_v = _Given(), _Given(), _Given()
        module.project = nn.Identity()

        def call(query: Tensor, key: Tensor, value: Tensor, *parameters: Tensor) -> Tensor:
            module.to_q.given, module.to_k.given, module.to_v.given = query, key, value
            if parameters:
                del module.wbias
                module.wbias = parameters[0]
            return module(query)

        return call

    return make


RIVALS = {
    'softmax': Rival(_softmax(causal=False)),
    'softmax-causal': Rival(_softmax(causal=True)),
    'depthwise': Rival(_depthwise),
    'linear': Rival(_linear),
    'dense-local': Rival(
        lambda tensors, options: partial(dense_local, window=options['window']), same_sum=True
    ),
    'aft-pytorch-full': Rival(_aft_pytorch('AFTFull'), package='aft-pytorch'),
    'aft-pytorch-simple': Rival(_aft_pytorch('AFTSimple'), package='aft-pytorch'),
}
