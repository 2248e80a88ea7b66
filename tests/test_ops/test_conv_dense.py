"""The dense form of AFT-conv, which is used on CUDA only, forced on the CPU."""

import inspect
from functools import partial

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.eager import conv, conv_dense

from ..helpers import each
from . import test_numerics
from .cases import CASES, run_with_gradients
from .test_backends import TOLERANCE, assert_close, oracle

CONV = pytest.mark.parametrize(
    'case', [c for c in CASES if c.op == 'aft_conv'], ids=lambda case: case.name
)
ONE = next(c for c in CASES if c.op == 'aft_conv' and c.options['grid'] == (5, 7))


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Force the dense form; return the number of tokens of each of its calls."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')
    calls, mean = [], conv_dense.dense_mean

    def dense_mean(key, *others, **options):
        calls.append(key.shape[1])
        return mean(key, *others, **options)

    monkeypatch.setattr(conv, 'DENSE_DEVICES', ('cpu',))
    monkeypatch.setattr(conv_dense, 'is_applicable', lambda *args: True)
    monkeypatch.setattr(conv_dense, 'dense_mean', dense_mean)
    return calls


@CONV
@each('dtype', TOLERANCE)
def test_matches_oracle(case, dtype, monkeypatch, calls):
    tensors = case.inputs(dtype=dtype)
    calls.clear()
    got, expected = run_with_gradients(case, tensors), oracle(case, tensors, monkeypatch)
    assert_close(got, expected, TOLERANCE[dtype])
    assert calls == [case.tokens]


@CONV
@each('bias', [59, 61, -59, -61])
@each('spike', [0, 50, 1000])
def test_biases_around_the_limit_of_the_fast_form(case, bias, spike, monkeypatch, calls):
    tensors = case.inputs(dtype=torch.float32)
    weight = bias * torch.rand(tensors[3].shape).round()
    centre = weight[(0, *(size // 2 for size in weight.shape[1:]))]
    centre.fill_(bias)
    key = tensors[1].detach().clone()
    key[:, key.shape[1] // 2] += spike
    calls.clear()
    test_numerics.compare(case, [tensors[0], key, tensors[2], weight], monkeypatch)
    if not case.options.get('causal') and case.options.get('global_connectivity', True):
        assert bool(calls) == (abs(bias) < 60)


@each(
    'check',
    [
        test_numerics.test_huge_keys,
        test_numerics.test_late_spike,
        test_numerics.test_suppressed_spike,
        test_numerics.test_staircase,
    ],
)
@CONV
def test_numerics_of_keys(case, check, monkeypatch):
    inspect.unwrap(check)(case, torch.float32, monkeypatch)


@CONV
def test_padding_and_large_biases(case, monkeypatch):
    inspect.unwrap(test_numerics.test_padding_may_be_nan_or_inf)(case, 1000, monkeypatch)
    inspect.unwrap(test_numerics.test_large_bias)(case, monkeypatch)


def test_only_a_large_bias_leaves_the_dense_form(calls):
    """A w of −20 is exact without a difference, and keys of any size are not checked."""
    query, key, value, weight = (x.detach() for x in ONE.inputs(dtype=torch.float32))
    for scale, bias in ((1, weight), (1e4, weight), (1, torch.full_like(weight, -20))):
        ONE(query, scale * key, value, bias)
    assert len(calls) == 3
    ONE(query, key, value, torch.full_like(weight, -61))
    assert len(calls) == 3


def test_second_derivatives():
    small = [torch.randn(1, 4, c, dtype=torch.float64, requires_grad=True) for c in (2, 1, 2)]
    weight = torch.randn(1, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(partial(ops.aft_conv, grid=(2, 2)), [*small, weight])


@pytest.mark.parametrize(
    'grid, kernel, heads, batch, precision, expected',
    [
        (14, 11, 384, 128, 'bf16', True),
        (14, 11, 384, 128, 'bf16x2', True),
        (14, 11, 32, 64, 'fp32', True),
        (24, 25, 32, 32, 'bf16x2', True),
        (14, 3, 384, 128, 'fp32', True),
        (24, 3, 384, 32, 'fp32', False),
        (14, 11, 384, 1, 'bf16', False),
        (32, 11, 384, 32, 'bf16', True),
        (64, 11, 384, 32, 'bf16', False),
        (32, 11, 32, 32, 'bf16', True),
    ],
)
def test_dense_form_is_used_where_it_costs_less(
    grid, kernel, heads, batch, precision, expected, monkeypatch
):
    """For an image of many heads W is larger than the image; for many on 64 × 64 too large."""
    monkeypatch.undo()
    device = type('Value', (), dict(shape=(batch, grid**2, 384), device=torch.device('cuda')))
    weight = torch.empty(heads, kernel, kernel, device='meta')
    assert conv_dense.is_applicable(device, weight, (grid, grid), precision) == expected
    cpu = torch.empty(batch, grid**2, 384, device='meta')
    assert not conv_dense.is_applicable(cpu, weight, (grid, grid), precision)
