"""The kernels of AFT-full with a bias per sample or head, and masks of pairs; see `triton_parity.py`."""

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.cases import pairs

from .cases import PAIR_CASES, run_with_gradients
from .test_backends import assert_close, oracle
from .triton_parity import DEVICE, MARKS, TERMS, TOLERANCE, compare, inputs

from .kernel_cases import IDS, SHIPPED, spread_keys, tiling  # isort: skip - where Triton is
from aft_mm.ops.triton import full_local as launch  # isort: skip

pytestmark = MARKS


@pytest.mark.parametrize('case', [c for c in PAIR_CASES if c.tokens < 60], ids=IDS)
def test_matches_oracle(case, monkeypatch):
    # With one token the gradients of key and w cancel to 0: see test_numerics.py.
    compare(case, inputs(case), monkeypatch, TERMS if case.tokens == 1 else 1e-3)


@SHIPPED
def test_bfloat16(monkeypatch):
    """Two tiles of targets and of sources, with and without a gradient."""
    case = pairs(70, 90, heads=2, masked=True)
    tensors = inputs(case, 1, torch.bfloat16)
    tensors[2] += 10  # gradients of keys and biases are then small differences
    compare(case, tensors, monkeypatch)
    with torch.no_grad():  # then it is multiplied as it is
        got = case(*tensors)
    assert_close([got], oracle(case, tensors, monkeypatch)[:1], TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(
    ('kind', 'size'), [('huge', 25), ('late', -80), ('late', 80), ('absent', 80)]
)
def test_keys_and_biases_of_any_size(kind, size, monkeypatch):
    case = pairs(33, causal=size > 0, heads=1 if size == 25 else None, masked=size == 80)
    query, key, value, bias = inputs(case, 2)
    compare(case, [query, spread_keys(kind, key), value, size * bias.sign()], monkeypatch, TERMS)


@pytest.mark.parametrize('causal', [False, True])
def test_hidden_numbers_may_be_nan(causal, monkeypatch):
    """So may a key that no row sees; a row without keys is 0, and hidden pairs get no gradient."""
    case = pairs(9, causal=causal)
    mask = torch.rand(3, 9, 9, device=DEVICE) < 0.6
    mask[0, 2], mask[1, :, 3], mask[2] = False, False, False
    padding = torch.ones(3, 9, dtype=torch.bool, device=DEVICE)
    padding[1, 5:] = False
    options = dict(pair_mask=mask, key_mask=padding)
    tensors = inputs(case, 3)
    tensors[3][0, 4, :2] = -torch.inf
    expected = oracle(case, tensors, monkeypatch, **options)
    tensors[3][~mask] = torch.nan
    for x in tensors[1:3]:
        x[1, 3], x[2], x[1, 5:] = torch.nan, torch.inf, torch.nan
    got = run_with_gradients(case, tensors, **options)
    assert_close(got, expected, TOLERANCE[torch.float32], TERMS)
    assert (got[0][0, 2] == 0).all() and (got[0][2] == 0).all()
    assert (got[4][~mask] == 0).all() and (got[2][1, 3] == 0).all()


def test_a_nan_reaches_only_the_rows_that_see_it():
    query, key, value, bias = inputs(pairs(9))
    mask = torch.rand(2, 9, 9, device=DEVICE) < 0.6
    before = ops.aft_full(query, key, value, bias, pair_mask=mask)
    for which in (1, 2):
        changed = [query, key.clone(), value.clone(), bias]
        changed[which][0, 4, 0] = torch.nan
        got = ops.aft_full(*changed, pair_mask=mask)
        reached = torch.zeros_like(got, dtype=torch.bool)
        reached[0, :, 0] = mask[0, :, 4]
        assert got[reached].isnan().all()
        torch.testing.assert_close(got[~reached], before[~reached], rtol=1e-5, atol=1e-6)


def test_only_rows_that_float32_does_not_hold_are_recomputed():
    query, key, value, bias = inputs(pairs(40, causal=True))
    block = tiling.choose_block(value, True, own=True)

    def flags_of(key, bias):
        arguments = query, key.requires_grad_(), value, bias[:, None], None, None, None, None
        saved = launch.product(*arguments, True, 'sigmoid', True)[1]
        band = tiling.make_band(bias[:, None], value, None, None, True, block.tile)
        return tiling.split_saved(saved, value, band, block.width).flags

    assert (flags_of(9 * key, bias) == 0).all()
    starved = bias.clone()
    starved[1, :, 35], late = -100, key.detach().clone()
    late[1, 35] += 100
    assert flags_of(late, starved).flatten().tolist() == [0, 0, 0, 1]


def test_strides_and_no_gradient_of_w():
    case = pairs(9, heads=2)
    tensors = inputs(case)
    expected = run_with_gradients(case, tensors)
    query, key, value, bias = (x.mT.contiguous().mT for x in tensors)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output = case(*leaves, bias)
    assert torch.equal(output, expected[0])
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(output, leaves, cotangent.to(output))
    torch.testing.assert_close(list(gradients), expected[1:4], rtol=1e-5, atol=1e-6)
