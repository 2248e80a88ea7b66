"""The causal decoders that the benchmarks compare: one model, another mixer in its slot."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from memory import added_peak
from torch import Tensor

import aft_mm.models  # noqa: F401 - registers what is built below
from aft_mm.layers.mixers import AFTLocal, AFTSimple, SoftmaxAttention
from aft_mm.registry import MODELS

VOCABULARY = 256


def dense_local(query, key, value, pos_u, pos_v, *, window: int, **ignored) -> Tensor:
    """Causal AFT-local as one masked [T, T] product, fit for keys of moderate size only."""
    tokens = key.shape[1]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    bias = (pos_u @ pos_v.T).masked_fill(distance >= window, 0)
    weight = torch.exp(bias.masked_fill(distance < 0, -torch.inf))
    exp_key = torch.exp(key - key.amax(1, keepdim=True))
    return torch.sigmoid(query) * (weight @ (exp_key * value)) / (weight @ exp_key)


@MODELS.register_module()
class DenseAFTLocal(AFTLocal):
    """AFT-local by :func:`dense_local`."""

    op = staticmethod(dense_local)


@MODELS.register_module()
class DenseSoftmaxAttention(SoftmaxAttention):
    """Causal softmax attention written out, without scaled_dot_product_attention."""

    def _mix(self, query, key, value, grid, key_mask) -> Tensor:
        query, key, value = self._heads(query), self._heads(key), self._heads(value)
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = F.softmax(scores.masked_fill(future, -torch.inf), -1)
        return (weights @ value).transpose(1, 2).flatten(2)


@MODELS.register_module()
class NoMixing(AFTSimple):
    """All projections and the gate, but no mixing: the most that any AFT could reach."""

    def _mix(self, query, key, value, grid, key_mask) -> Tensor:
        return torch.sigmoid(query) * value + 0 * key


def mixer(name: str, heads: int) -> dict:
    """The config of 'aft-simple', 'aft-local-32', 'dense-aft-local-256', 'softmax', ...

    Any other name is that of a registered mixer without further arguments, such as
    'aft_mm.AFTSimple'.
    """
    kind, _, window = name.rpartition('-')
    if kind in ('aft-local', 'dense-aft-local') and window.isdecimal():
        prefix = 'Dense' if kind.startswith('dense') else ''
        return dict(type=f'aft_mm.{prefix}AFTLocal', window=int(window), rank=64)
    named = {
        'aft-simple': dict(type='aft_mm.AFTSimple'),
        'bound': dict(type='aft_mm.NoMixing'),
        'softmax': dict(type='aft_mm.SoftmaxAttention', num_heads=heads),
        'dense-softmax': dict(type='aft_mm.DenseSoftmaxAttention', num_heads=heads),
    }
    return named.get(name, dict(type=name))


def build(name: str, tokens: int, dims: int, layers: int, heads: int = 4) -> torch.nn.Module:
    """A SequenceDecoder of `tokens` positions with the mixer `name`, the same weights each time."""
    torch.manual_seed(0)
    return MODELS.build(
        dict(
            type='aft_mm.SequenceDecoder',
            embed_dims=dims,
            num_layers=layers,
            embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=VOCABULARY),
            token_mixer=mixer(name, heads),
            grid=(tokens,),
        )
    )


def infer(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """The forward pass without gradient."""
    with torch.inference_mode():
        return model(tokens)


def train_step(model: torch.nn.Module, tokens: Tensor) -> None:
    """Forward and backward of a loss; the gradients are dropped."""
    model(tokens).square().mean().backward()
    model.zero_grad(set_to_none=True)


def peak_memory(
    run: Callable[[torch.nn.Module, Tensor], object],
    name: str,
    tokens: int,
    dims: int,
    layers: int,
    batch: int,
    threads: int,
) -> float:
    """MiB that `run`, of a decoder and a batch, adds to a process that holds both."""
    torch.set_num_threads(threads)
    model = build(name, tokens, dims, layers)
    sequence = torch.randint(VOCABULARY, (batch, tokens))
    run(build(name, 64, dims, 1), sequence[:, :64])
    return added_peak(partial(run, model, sequence))
