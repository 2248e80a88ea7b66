"""The kernels of AFT-local-learned against the float64 oracle; see `triton_parity.py`."""

import pytest
import torch

from .cases import Case, run_with_gradients
from .test_backends import assert_close, oracle
from .triton_parity import DEVICE, TERMS, compare, on_device

from .product_cases import MARKS, spread_keys  # isort: skip - where Triton is
from aft_mm.ops.triton import local_learned as library  # isort: skip

pytestmark = MARKS


def case(tokens, window, grid=None, rank=3, causal=False, channels=6):
    shapes = ((tokens, rank),) * 2 if rank else ((tokens, window if causal else 2 * window - 1),)
    options = dict(window=window, grid=grid, causal=causal)
    name = f'{grid or tokens}-s={window}-causal={causal}'
    return Case(name, 'aft_local_learned', tokens, options, None, channels, shapes, False)


ONE_TILE = [case(9, 3), case(9, (2, 2), (3, 3), causal=True), case(9, 3, rank=0, causal=True)]
MANY_TILES = [case(150, 3), case(150, (3, 4), (15, 10), causal=True)]
IDS = lambda case: case.name  # noqa: E731
EACH = pytest.mark.parametrize('case', ONE_TILE, ids=IDS)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_types(dtype, monkeypatch):
    case = MANY_TILES[1]
    compare(case, on_device(case.inputs(1, dtype=dtype)), monkeypatch)


@pytest.mark.parametrize('case', [*ONE_TILE, MANY_TILES[0], case(7, 0, causal=True)], ids=IDS)
def test_matches_oracle(case, monkeypatch):
    compare(case, on_device(case.inputs(2, dtype=torch.float32)), monkeypatch)


@pytest.mark.parametrize('kind', ['late'])
@pytest.mark.parametrize('case', ONE_TILE[:1] + MANY_TILES[1:], ids=IDS)
def test_keys_of_any_size(kind, case, monkeypatch):
    query, key, *others = on_device(case.inputs(1, dtype=torch.float32))
    compare(case, [query, spread_keys(kind, key), *others], monkeypatch, TERMS)


@pytest.mark.parametrize('size, spike', [(31, 0), (-80, 0), (80, 100)])
def test_biases_of_any_size(size, spike, monkeypatch):
    case = ONE_TILE[2]
    query, key, value, bias = on_device(case.inputs(dtype=torch.float32))
    key[:, 2] += spike
    compare(case, [query, key, value, size * bias.sign()], monkeypatch, TERMS)


@pytest.mark.parametrize('gate', ['relu', 'none'])
def test_gates(gate, monkeypatch):
    query, *others = on_device(ONE_TILE[0].inputs(dtype=torch.float32))
    if gate == 'relu':
        compare(ONE_TILE[0], [query, *others], monkeypatch, gate=gate)
    else:
        call = lambda *parts, **extra: ONE_TILE[0](None, *parts, gate=gate, **extra)  # noqa: E731
        compare(call, others, monkeypatch)


@EACH
def test_padding_may_be_nan_or_inf(case, monkeypatch):
    query, key, value, *bias = on_device(case.inputs(batch=4, dtype=torch.float32))
    mask = torch.rand(4, 9, device=DEVICE) < 0.6
    mask[1], mask[2, :4], mask[3, 4:] = False, False, False
    hidden = ~mask.unsqueeze(-1)
    clean = [query, key.masked_fill(hidden, 0), value.masked_fill(hidden, 0), *bias]
    poisoned = [query, key.masked_fill(hidden, torch.nan), value.masked_fill(hidden, torch.inf)]
    got = run_with_gradients(case, [*poisoned, *bias], key_mask=mask)
    assert_close(got, oracle(case, clean, monkeypatch, key_mask=mask), 2e-5, TERMS)
    assert (got[0][1] == 0).all()
    assert all((x.masked_select(hidden) == 0).all() for x in got[2:4])


def test_opcheck():
    """opcheck: schema, fake kernel, autograd registration, compiled with dynamic shapes."""
    query, key, value, bias = on_device(ONE_TILE[2].inputs(1, dtype=torch.float32))
    tensors = [x.requires_grad_() for x in (query, key, value, bias)]
    arguments = *tensors, None, [3], None, True, 'sigmoid', True
    torch.library.opcheck(library.local_learned, arguments)
