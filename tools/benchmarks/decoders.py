"""Causal decoders of the benchmarks, which differ only in the token mixer."""

import ast
import re
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from arguments import MIXER_NAMES, PLAIN, WINDOWED, WITH_HEADS
from measuring import added_peak
from rivals import dense_local
from torch import Tensor

import aft_mm.models  # noqa: F401 - registers what is built below
from aft_mm.layers.mixers import AFTConv, AFTLocal, AFTSimple, SoftmaxAttention
from aft_mm.registry import MODELS

VOCABULARY = 256
Run = Callable[[torch.nn.Module, Tensor], object]


@MODELS.register_module()
class DenseAFTLocal(AFTLocal):
    def _mix(self, query, key, value, grid, key_mask) -> Tensor:
        shared = dict(causal=self.causal, key_mask=key_mask, gate=self.gate)
        tensors = query, key, value, *self._op_bias(grid)
        return dense_local(*tensors, **self._op_options(grid), **shared)


@MODELS.register_module()
class DenseSoftmaxAttention(SoftmaxAttention):
    def _mix(self, query, key, value, grid, key_mask) -> Tensor:
        query, key, value = self._heads(query), self._heads(key), self._heads(value)
        scores = query @ key.transpose(2, 3) / query.shape[-1] ** 0.5
        future = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        weights = F.softmax(scores.masked_fill(future, -torch.inf), -1)
        return (weights @ value).transpose(1, 2).flatten(2)


@MODELS.register_module()
class NoMixing(AFTSimple):
    """All projections and the gate without mixing, the upper bound for any AFT."""

    def _mix(self, query, key, value, grid, key_mask) -> Tensor:
        return torch.sigmoid(query) * value + 0 * key


def mixer(name: str, heads: int) -> dict:
    windowed = re.fullmatch(r'(.+)-([1-9]\d*)', name)
    if windowed and windowed[1] in WINDOWED:
        return dict(WINDOWED[windowed[1]], window=int(windowed[2]))
    if name in WITH_HEADS:
        return dict(WITH_HEADS[name], num_heads=heads)
    config = PLAIN.get(name) or registered(name)
    if config is None:
        raise ValueError(f'a mixer must be one of {MIXER_NAMES}, got {name!r}')
    return config


def registered(text: str) -> dict | None:
    """Parse 'scope.Type' or 'scope.Type(name=value, ...)'; return None for other texts."""
    try:
        call = ast.parse(text if text.endswith(')') else f'{text}()', mode='eval').body
        kind = ast.unparse(call.func)
        known = re.fullmatch(r'\w+\.\w+', kind) and MODELS.get(kind) is not None
        if call.args or not known:
            return None
        return dict(type=kind, **{k.arg: ast.literal_eval(k.value) for k in call.keywords})
    except (SyntaxError, ValueError, TypeError, AttributeError):
        return None


def check_mixer(name: str, dims: int, heads: int) -> None:
    with torch.device('meta'):
        MODELS.build(dict(mixer(name, heads), embed_dims=dims, grid=(8,), causal=True))


def build(name: str, tokens: int, dims: int, layers: int, heads: int = 4) -> torch.nn.Module:
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


def random_tokens(batch: int, length: int, device: str = 'cpu') -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), device=device)


def infer(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        return model(tokens)


def cpu_peak(
    run: Run, name: str, tokens: int, batch: int, threads: int, dtype: str, *sizes: int
) -> float:
    torch.set_num_threads(threads)
    model = build(name, tokens, *sizes).to(getattr(torch, dtype))
    sequence = random_tokens(batch, tokens)
    dims, _, *heads = sizes
    run(build(name, 64, dims, 1, *heads), sequence[:, :64])
    return added_peak(partial(run, model, sequence))


@MODELS.register_module()
class ProjectionsOnly(AFTConv):
    """AFT-conv without the op: all projections, and a product of their results.

    An exported graph would leave out projections whose results are unused.
    """

    def _mix(self, query, key, value, grid, key_mask):
        return query * value * key.sum(-1, keepdim=True)
