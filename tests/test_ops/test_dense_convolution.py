"""AFT-conv as a dense product, which serves on CUDA only: here on the CPU, asked for."""

from functools import partial

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.eager import dense_convolution, mixing
from aft_mm.ops.geometry import kernel_index

from . import test_numerics
from .cases import CASES, run_with_gradients
from .test_backends import TOLERANCE, assert_close, oracle

CONV = pytest.mark.parametrize(
    'case', [c for c in CASES if c.op == 'aft_conv'], ids=lambda case: case.name
)
ONE = next(c for c in CASES if c.op == 'aft_conv' and c.options['grid'] == (5, 7))


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """The tokens of the calls that the dense form served."""
    torch.manual_seed(0)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')
    calls, mean = [], dense_convolution.dense_mean

    def dense_mean(key, *others):
        calls.append(key.shape[1])
        return mean(key, *others)

    monkeypatch.setattr(mixing, 'serves', lambda *args: True)
    monkeypatch.setattr(mixing, 'dense_mean', dense_mean)
    return calls


@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
@CONV
def test_matches_oracle(case, dtype, monkeypatch, served):
    tensors = case.inputs(dtype=dtype)
    got, expected = run_with_gradients(case, tensors), oracle(case, tensors, monkeypatch)
    assert_close(got, expected, TOLERANCE[dtype])
    assert served == [case.tokens]


@pytest.mark.parametrize('bias', [59, 61, -59, -61])
@pytest.mark.parametrize('spike', [0, 50, 1000])
@CONV
def test_both_sides_of_the_limit_of_the_bias(case, bias, spike, monkeypatch, served):
    tensors = case.inputs(dtype=torch.float32)
    weight = bias * torch.rand(tensors[3].shape).round()
    centre = weight[(0, *(size // 2 for size in weight.shape[1:]))]
    centre.fill_(bias)
    key = tensors[1].detach().clone()
    key[:, key.shape[1] // 2] += spike
    test_numerics.compare(case, [tensors[0], key, tensors[2], weight], monkeypatch)
    if not case.options.get('causal') and case.options.get('global_connectivity', True):
        assert bool(served) == (abs(bias) < 60)


@pytest.mark.parametrize(
    'check',
    [
        test_numerics.test_huge_keys,
        test_numerics.test_late_spike,
        test_numerics.test_suppressed_spike,
        test_numerics.test_staircase,
    ],
    ids=lambda check: check.__name__,
)
@CONV
def test_numerics_of_keys(case, check, monkeypatch):
    check(case, torch.float32, monkeypatch)


@CONV
def test_padding_and_large_biases(case, monkeypatch):
    test_numerics.test_padding_holds_anything(case, 1000, monkeypatch)
    test_numerics.test_large_bias(case, monkeypatch)


def test_nothing_but_a_large_bias_leaves_the_dense_form(served):
    """w = −20 subtracts nothing here, and keys of any size are not looked at."""
    query, key, value, weight = (x.detach() for x in ONE.inputs(dtype=torch.float32))
    for scale, bias in ((1, weight), (1e4, weight), (1, torch.full_like(weight, -20))):
        ONE(query, scale * key, value, bias)
    assert len(served) == 3
    ONE(query, key, value, torch.full_like(weight, -61))
    assert len(served) == 3


def test_gradients_of_gradients():
    assert torch.autograd.gradcheck(ONE, ONE.inputs(batch=1))
    small = [torch.randn(1, 4, c, dtype=torch.float64, requires_grad=True) for c in (2, 1, 2)]
    weight = torch.randn(1, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(partial(ops.aft_conv, grid=(2, 2)), [*small, weight])


@pytest.mark.parametrize('grid, kernel', [((6,), (3,)), ((3, 4), (3, 9)), ((2, 3, 4), (3, 1, 5))])
def test_the_matrix_holds_the_kernel_along_diagonals(grid, kernel):
    weight = torch.randn(2, *kernel, requires_grad=True)
    tokens = torch.arange(torch.Size(grid).numel())
    index = kernel_index(tokens[:, None], tokens, kernel, grid)
    expected = weight.flatten(1)[:, index.clamp_min(0)].masked_fill(index < 0, 1.5)
    got = dense_convolution.toeplitz(weight, grid, 1.5)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    cotangent = torch.randn_like(expected)
    gradients = [torch.autograd.grad(x, weight, cotangent)[0] for x in (got, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    'grid, kernel, heads, batch, parts, serves',
    [
        (14, 11, 384, 128, 1, True),
        (14, 11, 384, 128, 2, True),
        (14, 11, 32, 64, 0, True),
        (24, 25, 32, 32, 2, True),
        (14, 3, 384, 128, 0, True),
        (24, 3, 384, 32, 0, False),
        (14, 11, 384, 1, 1, False),
        (32, 11, 384, 32, 1, False),
    ],
)
def test_what_the_counts_say(grid, kernel, heads, batch, parts, serves, monkeypatch):
    """A single image of many heads is less to read than W is; 32 × 32 is too long."""
    device = type('Value', (), dict(shape=(batch, grid**2, 384), device=torch.device('cuda')))
    weight = torch.empty(heads, kernel, kernel, device='meta')
    assert dense_convolution.serves(device, weight, (grid, grid), parts) == serves
    cpu = torch.empty(batch, grid**2, 384, device='meta')
    assert not dense_convolution.serves(cpu, weight, (grid, grid), parts)
