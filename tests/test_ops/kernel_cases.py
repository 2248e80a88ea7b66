"""Cases and helpers for the tests of the Triton kernels."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aft_mm.ops import cases
from aft_mm.ops.cases import full, local

from .triton_parity import inputs

from aft_mm.ops.triton import tiling  # isort: skip - where Triton is
from aft_mm.ops.triton import full_local as library  # isort: skip

IDS = lambda case: getattr(case, 'name', None)  # noqa: E731


ONE_TILE = [full(9, 5), full(9, causal=True), local(9, 3), local(9, 3, rank=0, causal=True)]
ONE_TILE.append(local(9, (2, 2), grid=(3, 3), causal=True))
# Four tiles of 32 tokens, causal and not, on a line and on a grid.
MANY_TILES = [
    local(100, 3),
    local(100, 40, causal=True),
    local(100, (3, 4), grid=(10, 10)),
    local(100, (3, 4), grid=(10, 10), causal=True),
    full(70, 130),
    full(100, causal=True),
]


# Shipped block sizes instead of small ones.
SHIPPED = pytest.mark.parametrize('cuts', ['shipped'], indirect=True)


def spread_keys(kind, key):
    """Return keys for which sums with a common maximum fail; a number is that of a step."""
    token = torch.arange(key.shape[1]).view(1, -1, 1).to(key)
    if isinstance(kind, int):
        return key + 120 * (token >= kind)
    return {
        'huge': key + 1e4 * torch.randn(key.shape).sign().to(key),
        'rising': key + 120 * token,
        'late': key + 1000 * (token == key.shape[1] - 1),
        'absent': key.masked_fill(token % 3 == 1, -torch.inf),
        'lowest': torch.full_like(key, torch.finfo(key.dtype).min),
    }[kind]


def causal_simple(tokens, channels=3, **options):
    return cases.simple(tokens, channels=channels, causal=True, **options)


def conv(grid=(2, 5), kernel=(3, 3), heads=2, channels=4, **options):
    return cases.conv(grid, kernel, heads, channels=channels, **options)


def op_arguments(case, tensors=None, key_mask=None, batch=1):
    if tensors is None:
        tensors = inputs(case, batch)
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
    return [query, key, value, bias, key_mask, None, window, grid, bool(causal), gate]


def cut_of(arguments):
    _, _, value, bias, _, _, window, grid, causal, _ = arguments
    cut = tiling.choose_block(value, True)
    return cut, tiling.make_band(bias, value, window, grid, causal, cut.tile)


def detached(arguments):
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]


class NoWait(TorchDispatchMode):
    """Refuse operations that read a value or have data-dependent sizes; record kernel calls."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
        assert not set(tags) & set(function.tags), f'{function} waits for the device'
        if function.namespace == 'aft_mm':
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))
