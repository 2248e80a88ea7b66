"""The kernels of AFTLocalHard against the float64 oracle; see `triton_parity.py`."""

import pytest
import torch

from .cases import CASES, run_with_gradients
from .test_dispatch import LargestTensor
from .triton_parity import DTYPES, MARKS, TERMS, compare, on_device

from .kernel_cases import SHIPPED, line, plane, spread_keys  # isort: skip - where Triton is

pytestmark = MARKS


def inputs(case, batch=1, dtype=torch.float32):
    return on_device(case.inputs(batch, dtype=dtype))


SERVED = [case for case in CASES if case.op == 'aft_local_hard']
LINES = [line(7, 7), line(40, 13), line(25, 11, causal=False), line(9, 5, channels=40)]
PLANES = [
    plane((2, 2)),
    plane((2, 4)),
    plane((100, 100), causal=False),
    plane((4, 4), (1, 9)),
    plane((6, 2), (37, 3)),
    plane((4, 50), (3, 20), causal=False),
]


@pytest.mark.parametrize('case', SERVED + LINES + PLANES, ids=lambda case: case.name)
def test_matches_oracle(case, monkeypatch):
    compare(case, inputs(case, batch=2 if case.tokens < 10 else 1), monkeypatch)


ALONE = [line(9, 1), plane((2, 2), (1, 9)), plane((2, 2), (9, 1))]


@pytest.mark.parametrize('case', ALONE, ids=lambda case: case.name)
def test_a_window_of_the_token_itself(case, monkeypatch):
    query, key, value = inputs(case)
    got = compare(case, [query, key, value], monkeypatch, TERMS)[0]
    torch.testing.assert_close(got, torch.sigmoid(query) * value)


@SHIPPED
def test_blocks_of_a_device(monkeypatch):
    case = plane((4, 4), (3, 7), channels=40)
    compare(case, inputs(case), monkeypatch)


@DTYPES
@pytest.mark.parametrize('case', [line(20, 9), plane((4, 4))], ids=['line', 'plane'])
def test_types(case, dtype, monkeypatch):
    query, key, value = inputs(case, dtype=dtype)
    # Far from 0, so that the gradient of the key is a small difference.
    compare(case, [query, key, value + 10], monkeypatch)


@pytest.mark.parametrize(
    'case, kind',
    [
        (line(30, 13), 'huge'),
        (line(30, 13), 'lowest'),
        (line(21, 5, causal=False), 'rising'),
        (plane((4, 4)), 'rising'),
        (plane((4, 4), causal=False), 'huge'),
    ],
)
def test_keys_of_any_size(case, kind, monkeypatch):
    query, key, value = inputs(case)
    compare(case, [query, spread_keys(kind, key), value], monkeypatch, TERMS)


@pytest.mark.parametrize('case', [line(128, 20), plane((8, 16), (8, 16))], ids=['line', 'plane'])
def test_memory_grows_with_tokens_not_their_square(case):
    with LargestTensor() as recorder:
        run_with_gradients(case, inputs(case))
    assert recorder.largest <= 3 * 3 * 128 * 1.5
