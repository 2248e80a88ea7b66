"""Cases and helpers for the tests of the product kernels of AFT-full and AFT-local."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .cases import Case
from .triton_parity import MARKS, on_device

from aft_mm.ops.triton import tiling  # isort: skip - where Triton is
from aft_mm.ops.triton import full_local as library  # isort: skip

IDS = lambda case: getattr(case, 'name', None)  # noqa: E731


def full(tokens, sources=None, channels=6, **options):
    shape = tokens, sources or tokens
    name = 'full-{}x{}x{}'.format(*shape, channels)
    return Case(name, 'aft_full', tokens, options, sources, channels, (shape,), channels=channels)


def local(tokens, window, rank=3, channels=6, **options):
    """Return a case with factors, or with a free bias for rank 0."""
    causal = options.get('causal', False)
    shapes = ((tokens, rank),) * 2 if rank else ((tokens, window if causal else 2 * window - 1),)
    name = f'local-{tokens}x{channels}-s={window}-rank={rank}-causal={causal}'
    options = dict(window=window, **options)
    return Case(name, 'aft_local', tokens, options, None, channels, shapes, channels=channels)


ONE_TILE = [full(9, 5), full(9, causal=True), local(9, 3), local(9, 3, rank=0, causal=True)]
ONE_TILE.append(local(9, (2, 2), grid=(3, 3), causal=True))
EACH = pytest.mark.parametrize('case', ONE_TILE, ids=IDS)
# Five tiles of 32 tokens, causal and not, on a line and on a grid.
MANY_TILES = [
    local(150, 3),
    local(150, 40, causal=True),
    local(150, (3, 4), grid=(15, 10)),
    local(150, (3, 4), grid=(15, 10), causal=True),
    full(70, 130),
    full(100, causal=True),
]


MARKS = [*MARKS, pytest.mark.usefixtures('cuts')]
SHIPPED = pytest.mark.parametrize('cuts', ['shipped'], indirect=True)


def spread_keys(kind, key):
    """Return keys of sizes for which sums with a common maximum fail."""
    token = torch.arange(key.shape[1]).view(1, -1, 1).to(key)
    return {
        'huge': key + 1e4 * torch.randn(key.shape).sign().to(key),
        'rising': key + 120 * token,
        'step': key + 120 * (token >= key.shape[1] // 2),
        'late': key + 1000 * (token == key.shape[1] - 1),
    }[kind]


def op_arguments(case, tensors=None, key_mask=None, batch=1):
    """Return the arguments of the op `product` up to `save`, all requiring gradients."""
    if tensors is None:
        tensors = on_device(case.inputs(batch, dtype=torch.float32))
    query, key, value, *bias = tensors
    window, grid, causal = (case.options.get(name) for name in ('window', 'grid', 'causal'))
    if window is not None:
        window, grid = library.window_on(window, grid)
    if window is not None:
        bias = [
            library.local_table(
                *bias, *(None,) * (2 - len(bias)), value, window, grid, causal, True
            )
        ]
    query, key, value, bias = (x.detach().requires_grad_() for x in (query, key, value, *bias))
    gate = case.options.get('gate', 'sigmoid')
    query = None if gate == 'none' else query
    return [query, key, value, bias, key_mask, window, grid, bool(causal), gate]


def cut_of(arguments):
    """Return the tiling of the call."""
    _, _, value, bias, _, window, grid, causal, _ = arguments
    cut = tiling.choose_block(value, True)
    return cut, tiling.make_band(bias, value, window, grid, causal, cut.tile)


def detached(arguments):
    """Detach the arguments."""
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]


class NoWait(TorchDispatchMode):
    """Raise an error for ops that synchronise: reading a value, or data-dependent sizes."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
        assert not set(tags) & set(function.tags), f'{function} waits for the device'
        return function(*args, **(kwargs or {}))
