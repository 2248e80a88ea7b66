"""The table of op cases that the tests of this folder run over, and how a case is run."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aft_mm import ops

CHANNELS = 6


@dataclass(frozen=True)
class Case:
    """One op with its static options, T, S and the shapes of its bias parameters."""

    name: str
    op: str
    tokens: int
    options: dict = field(default_factory=dict)
    sources: int | None = None
    heads: int = CHANNELS
    parameters: tuple[tuple[int, ...], ...] = ()
    weights_sum_to_one: bool = True
    channels: int = CHANNELS

    @property
    def function(self) -> Callable[..., Tensor]:
        return getattr(ops, self.op)

    def inputs(self, batch: int = 2, dtype=torch.float64, bias_scale: float = 1.0) -> list[Tensor]:
        """query, key, value and the bias parameters, all randn."""
        sources = self.sources or self.tokens
        shapes = [
            (batch, self.tokens, self.channels),
            (batch, sources, self.heads),
            (batch, sources, self.channels),
        ]
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        tensors += [
            torch.randn(shape, dtype=torch.float64) * bias_scale for shape in self.parameters
        ]
        return [tensor.to(dtype).requires_grad_() for tensor in tensors]

    def __call__(self, *tensors: Tensor, **extra) -> Tensor:
        return self.function(*tensors, **{**self.options, **extra})


def _simple(tokens, **options):
    label = '-'.join(f'{k}={v}' for k, v in options.items() if k != 'sources')
    sources = options.pop('sources', None)
    if options.get('key_function') == 'relu2':
        options['gate'] = 'relu'
    return Case(
        f'simple-{tokens}-{label}',
        'aft_simple',
        tokens,
        options,
        sources,
        weights_sum_to_one='key_function' not in options,
    )


def _full(tokens, causal=False, sources=None):
    return Case(
        f'full-{tokens}x{sources or tokens}-causal={causal}',
        'aft_full',
        tokens,
        dict(causal=causal),
        sources,
        parameters=((tokens, sources or tokens),),
    )


def _factors(op, tokens, window, grid=None, causal=False, rank=3):
    return Case(
        f'{op[4:]}-{grid or tokens}-s={window}-causal={causal}',
        op,
        tokens,
        dict(window=window, grid=grid, causal=causal),
        parameters=((tokens, rank), (tokens, rank)),
        weights_sum_to_one=op == 'aft_local',
    )


def _free(op, tokens, window, causal=False):
    return Case(
        f'{op[4:]}-free-{tokens}-s={window}-causal={causal}',
        op,
        tokens,
        dict(window=window, causal=causal),
        parameters=((tokens, window if causal else 2 * window - 1),),
        weights_sum_to_one=op == 'aft_local',
    )


def _conv(grid, kernel, heads=2, causal=False, **options):
    label = '-degenerate' if options else ''
    return Case(
        f'conv-{grid}-k={kernel}-h={heads}-causal={causal}{label}',
        'aft_conv',
        math.prod(grid),
        dict(grid=grid, causal=causal, **options),
        heads=heads,
        parameters=((heads, *kernel),),
    )


def _window(tokens, window, grid=None, causal=True):
    return Case(
        f'window-{grid or tokens}-s={window}-causal={causal}',
        'aft_local_hard',
        tokens,
        dict(window=window, grid=grid, causal=causal),
    )


CASES = [
    _simple(7),
    _simple(5, sources=9),
    _simple(131, causal=True),
    _simple(1, causal=True),
    _simple(7, key_function='relu'),
    _simple(7, key_function='relu', causal=True),
    _simple(7, key_function='relu2'),
    _simple(5, key_function='relu2', sources=9),
    _simple(7, key_function='relu2', causal=True),
    _full(1),
    _full(7, sources=4),
    _full(63),
    _full(7, causal=True),
    _full(63, causal=True),
    _factors('aft_local', 7, 3),
    _factors('aft_local', 63, 0),
    _factors('aft_local', 63, 1, causal=True),
    _factors('aft_local', 130, 5),
    _factors('aft_local', 130, 40, causal=True),
    _factors('aft_local', 131, 33, causal=False),
    _factors('aft_local', 110, (2, 3), grid=(11, 10)),
    _factors('aft_local', 110, (3, 4), grid=(10, 11), causal=True),
    _factors('aft_local', 111, 2, grid=(37, 3), causal=True),
    _factors('aft_local', 12, (9, 9), grid=(3, 4)),
    _free('aft_local', 7, 1),
    _free('aft_local', 7, 20, causal=True),
    _free('aft_local', 63, 5),
    _free('aft_local', 63, 33, causal=True),
    _free('aft_local', 131, 5),
    _free('aft_local', 131, 40, causal=True),
    _conv((7,), (3,)),
    _conv((9,), (5,), causal=True),
    _conv((1, 9), (1, 5), heads=6),
    _conv((5, 4), (3, 3), heads=1),
    _conv((5, 7), (3, 5), heads=6),
    _conv((4, 5), (9, 13), heads=3),
    _conv((3, 14), (3, 13), heads=3),
    _conv((5, 4), (3, 5), causal=True),
    _conv((3, 4, 2), (3, 1, 3)),
    _conv((3, 2, 4), (3, 3, 5), causal=True),
    _conv((5, 4), (3, 3), global_connectivity=False),
    _conv((5, 4), (3, 3), causal=True, global_connectivity=False),
    _window(1, 1),
    _window(63, 5),
    _window(63, 100),
    _window(30, 4, causal=False),
    _window(35, (4, 2), grid=(5, 7)),
    _window(35, (2, 6), grid=(7, 5)),
    _window(12, (4, 12), grid=(3, 4)),
    _window(35, 4, grid=(5, 7), causal=False),
    _factors('aft_local_learned', 7, 3),
    _factors('aft_local_learned', 63, 0),
    _factors('aft_local_learned', 7, 0, causal=True),
    _factors('aft_local_learned', 130, 4),
    _factors('aft_local_learned', 130, 40, causal=True),
    _free('aft_local_learned', 63, 4, causal=True),
    _free('aft_local_learned', 130, 40),
    _factors('aft_local_learned', 110, (2, 3), grid=(11, 10), causal=True),
    _factors('aft_local_learned', 12, (9, 9), grid=(3, 4)),
]
IDS = [case.name for case in CASES]
CAUSAL_CASES = [
    case for case in CASES if case.options.get('causal', False) or case.op == 'aft_local_hard'
]
CAUSAL_CASES = [case for case in CAUSAL_CASES if case.options.get('causal', True)]


def run_with_gradients(
    case: Case, tensors: list[Tensor], *, scale: float = 1.0, **extra
) -> list[Tensor]:
    """Output and the gradient of ``(output · fixed randn · scale).sum()`` towards every input."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = case(*leaves, **extra)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(
        (output * cotangent.to(output) * scale).sum(), leaves, allow_unused=True
    )
    filled = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, gradients, strict=True)
    ]
    return [output.detach(), *filled]
