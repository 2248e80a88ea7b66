"""The kernels of AFT-full and AFT-local; see `triton_parity.py`."""

import pytest
import torch

from ..helpers import nightly
from .cases import CASES, run_with_gradients
from .test_backends import assert_close, oracle
from .test_dispatch import LargestTensor
from .triton_parity import BFLOAT16, DEVICE, DTYPES, MARKS, TERMS, TOLERANCE, compare, inputs

from .kernel_cases import (  # isort: skip - where Triton is
    IDS,
    MANY_TILES,
    ONE_TILE,
    SHIPPED,
    NoWait,
    cut_of,
    detached,
    full,
    library,
    local,
    op_arguments,
    spread_keys,
    tiling,
)
from aft_mm.ops.triton import full_local as launch  # isort: skip

pytestmark = MARKS

# Longer ones are those of many tiles.
# Without those that differ only in sizes.
SERVED = [
    case
    for case in CASES
    if case.op in ('aft_full', 'aft_local') and (case.tokens < 60 or case.tokens == 110)
]
SIZES = [
    *SERVED,
    *(full(5, 70), full(40, channels=70, causal=True)),
    local(70, 2, rank=40),
    local(70, 3, channels=70),
]


@pytest.mark.parametrize('case', nightly(SIZES, lambda case: case.op == 'aft_full'), ids=IDS)
def test_matches_oracle(case, monkeypatch):
    tensors = inputs(case, 2 if case.tokens < 10 else 1)
    # With one token the gradients of key and w cancel to 0: see test_numerics.py.
    compare(case, tensors, monkeypatch, TERMS if case.tokens == 1 else 1e-3)


@SHIPPED
@BFLOAT16
def test_types(dtype, monkeypatch):
    case = MANY_TILES[3]
    tensors = inputs(case, 1, dtype)
    tensors[2] += 10  # gradients of keys and biases are then small differences
    compare(case, tensors, monkeypatch)


@SHIPPED
@DTYPES
@pytest.mark.parametrize('case', [full(40, 70)], ids=IDS)
def test_inference(case, dtype, monkeypatch):
    """Without a gradient bfloat16 is multiplied as it is."""
    tensors = inputs(case, 1, dtype)
    with torch.no_grad():
        got = case(*tensors)
    assert_close([got], oracle(case, tensors, monkeypatch)[:1], TOLERANCE[dtype])


@pytest.mark.parametrize('size, spike', [(25, 50), (-80, 0), (80, 100)])
@pytest.mark.parametrize(
    'case',
    nightly([*ONE_TILE[:2], *ONE_TILE[3:]], lambda case: case.op == 'aft_local'),
    ids=IDS,
)
def test_biases_of_any_size(case, size, spike, monkeypatch):
    query, key, value, *bias = inputs(case)
    key[:, 2] += spike
    bias[0] = size * bias[0].sign()
    if len(bias) == 2:
        bias = [torch.zeros_like(part) for part in bias]
        bias[0][:, 0], bias[1][:, 0] = size * torch.randn(9).sign(), 1
    compare(case, [query, key, value, *bias], monkeypatch, TERMS)


@pytest.mark.parametrize(
    'case, kind',
    [
        *((case, 'huge') for case in ONE_TILE),
        (MANY_TILES[1], 'rising'),
        (MANY_TILES[3], 'late'),
        (MANY_TILES[2], 'huge'),
        (MANY_TILES[4], 'late'),
    ],
    ids=IDS,
)
def test_keys_of_any_size(kind, case, monkeypatch):
    query, key, *others = inputs(case, 2 if case.tokens < 10 else 1)
    compare(case, [query, spread_keys(kind, key), *others], monkeypatch, TERMS)


def flags_of(case, tensors, key_mask=None):
    """Return the flags that a call with gradients writes, [B, tiles, blocks of channels]."""
    arguments = op_arguments(case, tensors, key_mask)
    saved = library.product(*arguments, True)[1]
    cut, band = cut_of(arguments)
    return tiling.split_saved(saved, arguments[2], band, cut.width).flags


def test_only_flagged_rows_are_recomputed():
    """Not for keys of a few nats, nor for rows that see nothing; where a late key starves a row."""
    case = MANY_TILES[1]
    query, key, *others = tensors = inputs(case, 2)
    mask = torch.ones(key.shape[:2], dtype=torch.bool, device=DEVICE)
    mask[0, :40], mask[1] = False, False
    assert (flags_of(case, tensors) == 0).all()
    assert (flags_of(case, [query, 9 * key, *others], mask) == 0).all()
    late = key.clone()
    late[1, 50, 2] = 100
    flags = flags_of(case, [query, late, *others])
    expected = torch.zeros_like(flags)
    expected[1, 1] = 1
    assert torch.equal(flags, expected)


@pytest.mark.parametrize('case', [full(40, causal=True), local(70, 3, causal=True)], ids=IDS)
def test_causality(case, monkeypatch):
    query, key, *others = inputs(case, 1)
    leaves = [x.clone().requires_grad_() for x in (query, key, *others)]
    before = case(*leaves)
    for x in torch.autograd.grad(before[:, :-7].sum(), leaves[:3]):
        assert (x[:, -7:] == 0).all() and (x[:, :-7] != 0).all()
    for spike in (20, 1000):  # within the range of the fast path, and beyond
        late = key.clone()
        late[:, -1] += spike
        after = compare(case, [query, late, *others], monkeypatch, TERMS)[0]
        torch.testing.assert_close(after[:, :-1], before.detach()[:, :-1], rtol=1e-4, atol=1e-5)


def test_a_bias_of_minus_infinity_hides(monkeypatch):
    case = full(9, 5)
    *others, bias = inputs(case, 1)
    bias[2], bias[3, 1] = -torch.inf, -torch.inf
    got = compare(case, [*others, bias], monkeypatch)
    assert (got[0][:, 2] == 0).all() and (got[4][2] == 0).all()


def test_the_bias_gradient_may_be_split_over_programs(monkeypatch):
    case = local(9, 3, channels=70)
    tensors = inputs(case)
    expected = run_with_gradients(case, tensors)
    monkeypatch.setattr(launch, 'PROGRAMS_PER_PROCESSOR', 10**6)
    assert launch.share_out(10, 1, tensors[2].device) == (10, 1)
    got = run_with_gradients(case, tensors)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_programs_of_the_bias_gradient_fill_the_device(monkeypatch):
    monkeypatch.setattr(launch, 'count_processors', lambda device: 50)
    assert launch.share_out(80, 200, 'meta') == (1, 80)
    assert launch.share_out(80, 60, 'meta') == (2, 40)
    assert launch.share_out(80, 3, 'meta') == (27, 3)


@pytest.mark.parametrize(
    ('case', 'which'),
    [(full(9, causal=True), 1), (local(9, 3, causal=True), 2)],
    ids=['key', 'value'],
)
def test_nan_does_not_reach_earlier_rows(case, which):
    tensors = inputs(case)
    before = case(*tensors)
    for number in (torch.nan, torch.inf, -torch.inf):
        tensors[which][0, 5, 0] = number
        for gradient in (False, True):
            got = case(*(x.clone().requires_grad_(gradient) for x in tensors)).detach()
            for rows in ((0, slice(5)), 1, (0, slice(None), slice(1, None))):
                torch.testing.assert_close(got[rows], before[rows], rtol=1e-5, atol=1e-6)


def launch_both(arguments, cut, band):
    """Forward and backward inside the op, where a mode does not see calls."""
    query, key, value, bias, mask, *_, gate = arguments
    call = launch.MatmulCall(query, key, value, bias, mask, gate, band, cut)
    saved = tiling.new_saved(value, band, cut.width)
    output = launch.launch_forward(call, saved)
    launch.launch_backward(output, saved, call, True)


@pytest.mark.parametrize('case', [ONE_TILE[0], ONE_TILE[-1]], ids=IDS)
def test_the_op_does_not_synchronise(case):
    arguments = detached(op_arguments(case, batch=2))
    places = cut_of(arguments)
    with NoWait():
        launch_both(arguments, *places)


def test_memory_grows_with_tokens_not_their_square():
    case = local(400, 3, channels=2, causal=True)
    arguments = detached(op_arguments(case))
    places = cut_of(arguments)
    with LargestTensor() as recorder:
        launch_both(arguments, *places)
    # Tiles of 64 tokens against two tiles, which the interpreter counts in bytes.
    assert recorder.largest <= 4 * 2 * 64 * 448 < 4 * 400 * 400
