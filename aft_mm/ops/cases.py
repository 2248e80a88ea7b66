import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from . import functional

CHANNELS = 6
# The largest error, relative to the largest entry of a tensor or to LEAST_SCALE.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
LEAST_SCALE = 1e-3


@dataclass(frozen=True)
class Case:
    """An op with its options, T, S and the shapes of its bias parameters.

    weights_sum_to_one: whether the output is a gated mean of the values.
    """

    name: str
    op: str
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    sources: int | None = None
    heads: int = CHANNELS
    parameters: tuple[tuple[int, ...], ...] = ()
    weights_sum_to_one: bool = True
    channels: int = CHANNELS

    @property
    def function(self) -> Callable[..., Tensor]:
        op: Callable[..., Tensor] = getattr(functional, self.op)
        return op

    @property
    def all_options(self) -> dict[str, Any]:
        """Every keyword of the op, defaults included."""
        keywords = inspect.signature(self.function).parameters.values()
        defaults = {p.name: p.default for p in keywords if p.kind == p.KEYWORD_ONLY}
        return {**defaults, **self.options}

    def shapes(self, batch: int) -> list[tuple[int, ...]]:
        sources = self.sources or self.tokens
        tokens = (self.tokens, self.channels), (sources, self.heads), (sources, self.channels)
        return [*((batch, *size) for size in tokens), *self.parameters]

    def inputs(
        self, batch: int = 2, dtype: torch.dtype = torch.float64, bias_scale: float = 1.0
    ) -> list[Tensor]:
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in self.shapes(batch)]
        tensors[3:] = [x * bias_scale for x in tensors[3:]]
        return [x.to(dtype).requires_grad_() for x in tensors]

    def __call__(self, *tensors: Tensor | None, **extra: Any) -> Tensor:
        return self.function(*tensors, **{**self.options, **extra})


def simple(
    tokens: int, sources: int | None = None, channels: int = CHANNELS, **options: Any
) -> Case:
    label = '-'.join(f'{k}={v}' for k, v in options.items())
    if options.get('key_function') == 'relu2':
        options['gate'] = 'relu'
    one = 'key_function' not in options
    name = f'simple-{tokens}-{label}'
    return Case(name, 'aft_simple', tokens, options, sources, channels, (), one, channels)


def decay(tokens: int, causal: bool = True, channels: int = CHANNELS) -> Case:
    name = f'decay-{tokens}-causal={causal}'
    options, sizes = dict(causal=causal), ((channels,),)
    return Case(name, 'aft_decay', tokens, options, None, channels, sizes, True, channels)


def full(
    tokens: int, sources: int | None = None, causal: bool = False, channels: int = CHANNELS
) -> Case:
    shape = tokens, sources or tokens
    name = 'full-{}x{}-causal={}'.format(*shape, causal)
    options = dict(causal=causal)
    return Case(name, 'aft_full', tokens, options, sources, channels, (shape,), True, channels)


def local(
    tokens: int,
    window: int | tuple[int, int],
    grid: tuple[int, int] | None = None,
    causal: bool = False,
    rank: int = 3,
    op: str = 'aft_local',
    channels: int = CHANNELS,
) -> Case:
    """AFT-local or AFT-local-learned with factors, or with a free bias if `rank` is 0."""
    parameters: tuple[tuple[int, ...], ...] = ((tokens, rank),) * 2
    if not rank:
        assert isinstance(window, int)
        parameters = ((tokens, window if causal else 2 * window - 1),)
    name = f'{op[4:]}-{"" if rank else "free-"}{grid or tokens}-s={window}-causal={causal}'
    options = dict(window=window, grid=grid, causal=causal)
    one = op == 'aft_local'
    return Case(name, op, tokens, options, None, channels, parameters, one, channels)


learned = functools.partial(local, op='aft_local_learned')


def conv(
    grid: Sequence[int],
    kernel: Sequence[int],
    heads: int = 2,
    causal: bool = False,
    channels: int = CHANNELS,
    **options: Any,
) -> Case:
    name = f'conv-{grid}-k={kernel}-h={heads}-causal={causal}{"-degenerate" if options else ""}'
    options = dict(grid=tuple(grid), causal=causal, **options)
    tokens, weight = math.prod(grid), ((heads, *kernel),)
    return Case(name, 'aft_conv', tokens, options, None, heads, weight, True, channels)


def hard(
    tokens: int,
    window: int | tuple[int, int],
    grid: tuple[int, int] | None = None,
    causal: bool = True,
    channels: int = CHANNELS,
) -> Case:
    name = f'window-{grid or tokens}-s={window}-causal={causal}'
    options = dict(window=window, grid=grid, causal=causal)
    return Case(name, 'aft_local_hard', tokens, options, None, channels, (), True, channels)


@dataclass(frozen=True)
class PairCase(Case):
    """AFT-full with a bias per head, per sample or both, and with a mask of pairs."""

    per_sample: bool = False
    masked: bool = False

    @property
    def function(self) -> Callable[..., Tensor]:
        return functional.aft_full

    def shapes(self, batch: int) -> list[tuple[int, ...]]:
        *tokens, bias = super().shapes(batch)
        return [*tokens, (batch, *bias) if self.per_sample else bias]

    def __call__(self, *tensors: Tensor | None, **extra: Any) -> Tensor:
        if self.masked:
            _, key, *_ = tensors
            assert key is not None
            extra['pair_mask'] = self.pair_mask(len(key)).to(key.device)
        return super().__call__(*tensors, **extra)

    def pair_mask(self, batch: int) -> Tensor:
        shape = batch, self.tokens, self.sources or self.tokens
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.6
        mask |= torch.eye(*shape[1:], dtype=torch.bool)
        mask[:, shape[2] :, 0] = True
        return mask


def pairs(
    tokens: int,
    sources: int | None = None,
    heads: int | None = None,
    causal: bool = False,
    per_sample: bool = True,
    masked: bool = False,
    channels: int = CHANNELS,
) -> PairCase:
    bias = (*([heads] if heads else []), tokens, sources or tokens)
    name = f'pairs-{"B×" * per_sample}{"×".join(map(str, bias))}-{causal=}-{masked=}'
    options = dict(causal=causal, num_heads=heads)
    return PairCase(
        name,
        'aft_full_batched',
        tokens,
        options,
        sources,
        channels,
        (bias,),
        channels=channels,
        per_sample=per_sample,
        masked=masked,
    )


# Small cases of all ops and options.
CASES = [
    simple(7),
    simple(5, 9),
    simple(131, causal=True),
    simple(1, causal=True),
    simple(7, key_function='relu'),
    simple(7, key_function='relu', causal=True),
    simple(7, key_function='relu2'),
    simple(5, 9, key_function='relu2'),
    simple(7, key_function='relu2', causal=True),
    decay(1),
    decay(7, causal=False),
    decay(131),
    decay(131, causal=False),
    full(1),
    full(7, 4),
    full(63),
    full(7, causal=True),
    full(63, causal=True),
    local(7, 3),
    local(63, 0),
    local(63, 1, causal=True),
    local(130, 5),
    local(130, 40, causal=True),
    local(131, 33),
    local(110, (2, 3), (11, 10)),
    local(110, (3, 4), (10, 11), causal=True),
    local(111, 2, (37, 3), causal=True),
    local(12, (9, 9), (3, 4)),
    local(7, 1, rank=0),
    local(7, 20, causal=True, rank=0),
    local(63, 5, rank=0),
    local(63, 33, causal=True, rank=0),
    local(131, 5, rank=0),
    local(131, 40, causal=True, rank=0),
    conv((7,), (3,)),
    conv((9,), (5,), causal=True),
    conv((1, 9), (1, 5), heads=6),
    conv((5, 4), (3, 3), heads=1),
    conv((5, 7), (3, 5), heads=6),
    conv((4, 5), (9, 13), heads=3),
    conv((3, 14), (3, 13), heads=3),
    conv((5, 4), (3, 5), causal=True),
    conv((3, 4, 2), (3, 1, 3)),
    conv((3, 2, 4), (3, 3, 5), causal=True),
    conv((5, 4), (3, 3), global_connectivity=False),
    conv((5, 4), (3, 3), causal=True, global_connectivity=False),
    hard(1, 1),
    hard(63, 5),
    hard(63, 100),
    hard(30, 4, causal=False),
    hard(35, (4, 2), (5, 7)),
    hard(35, (2, 6), (7, 5)),
    hard(12, (4, 12), (3, 4)),
    hard(35, 4, (5, 7), causal=False),
    learned(7, 3),
    learned(63, 0),
    learned(7, 0, causal=True),
    learned(130, 4),
    learned(130, 40, causal=True),
    learned(63, 4, causal=True, rank=0),
    learned(130, 40, rank=0),
    learned(110, (2, 3), (11, 10), causal=True),
    learned(12, (9, 9), (3, 4)),
]
PAIR_CASES = [
    pairs(1),
    pairs(7, 4),
    pairs(63, heads=2),
    pairs(7, heads=3, per_sample=False),
    pairs(7, 9, per_sample=False, masked=True),
    pairs(11, causal=True),
    pairs(33, heads=3, causal=True, per_sample=False),
    pairs(33, heads=2, causal=True, masked=True),
]
# Cases that take the branches of default configs.
LONG_CASES = [
    simple(500, causal=True, channels=64, key_function='relu', gate='relu'),
    simple(500, causal=True, channels=64, gate='relu'),
    simple(1100, causal=True, channels=64, key_function='relu', gate='relu'),
    simple(1100, causal=True, channels=64, key_function='relu2'),
    simple(3000, causal=True, channels=64),
    simple(601, causal=True, channels=65),
    decay(601, channels=65),
    decay(600, causal=False, channels=64),
    full(300, causal=True, channels=64),
    full(257, 401, channels=65),
    pairs(300, heads=2, causal=True, channels=64),
    pairs(257, 401, masked=True, channels=130),
    local(600, 32, causal=True, rank=64, channels=64),
    local(600, 32, rank=64, channels=64),
    local(600, (3, 4), (24, 25), causal=True, rank=40, channels=65),
    local(600, (3, 4), (24, 25), rank=40, channels=65),
    conv((600,), (31,), heads=5, channels=65),
    conv((8, 8), (5, 5), heads=4, channels=96),
    conv((14, 14), (25, 25), heads=64, channels=64),
    conv((28, 28), (11, 11), heads=64, channels=64),
    hard(1000, 100, channels=64),
    hard(600, (8, 6), (30, 20), channels=65),
]
# (small, large) cases to time, near the sizes of configs.
TIMED_CASES: dict[str, list[Case]] = {
    'aft_simple': [simple(n, causal=True, channels=d) for n, d in ((512, 256), (3072, 512))],
    'aft_full': [full(n, channels=384) for n in (196, 1024)],
    'aft_full_batched': [pairs(n, channels=128) for n in (100, 1000)],
    'aft_local': [local(n, 32, causal=True, rank=64, channels=512) for n in (512, 3072)],
    'aft_conv': [conv((n, n), (11, 11), heads=384, channels=384) for n in (14, 32)],
    'aft_local_hard': [hard(n, 32, channels=512) for n in (512, 3072)],  # only has a step
}
