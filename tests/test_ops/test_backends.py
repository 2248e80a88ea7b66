"""The default backend against the float64 oracle: forward and every gradient."""

import pytest
import torch

from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.eager import banded_matmul, full_local
from aft_mm.ops.kernel_check import GRADIENTS

from ..helpers import each
from . import cases
from .cases import CASES, Case, run_with_gradients

pytestmark = pytest.mark.usefixtures('eager')


def oracle(case: Case, tensors, monkeypatch, **extra):
    wide = [tensor.double() for tensor in tensors]
    with monkeypatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, 'reference')
        return run_with_gradients(case, wide, **extra)


RESULTS = ('output', *GRADIENTS)  # of `run_with_gradients`, in order


def assert_close(got, expected, relative, floor=1e-3, names=RESULTS):
    """Compare errors with the largest entry of each tensor, or `floor` if that is larger."""
    assert len(got) == len(expected) <= len(names)
    for name, a, b in zip(names, got, expected, strict=False):
        assert torch.isfinite(a).all(), f'{name} is not finite'
        scale = b.abs().max().clamp_min(floor)
        error = (a.double() - b).abs().max() / scale
        assert error <= relative, f'{name}: relative error {error:.2e} > {relative:.0e}'


# Dtypes of the eager tests.
TOLERANCE = {k: v for k, v in cases.TOLERANCE.items() if k != torch.float16}


@each('case', CASES)
@each('dtype', TOLERANCE)
def test_matches_oracle(case, dtype, monkeypatch):
    tensors = case.inputs(dtype=dtype)
    assert_close(
        run_with_gradients(case, tensors), oracle(case, tensors, monkeypatch), TOLERANCE[dtype]
    )


BANDED = [case for case in CASES if case.op in ('aft_full', 'aft_local')]


@each('case', BANDED)
def test_chunks_of_columns_match_oracle(case, monkeypatch):
    tensors = case.inputs(dtype=torch.float32)
    expected = oracle(case, tensors, monkeypatch)
    monkeypatch.setattr(banded_matmul, 'CHUNK', 1)
    monkeypatch.setattr(banded_matmul, 'SMALLEST_WIDTH', 5)  # of 12 columns: two parts and a rest
    assert_close(run_with_gradients(case, tensors), expected, TOLERANCE[torch.float32])


@each('case', CASES)
def test_inference_is_equal_and_does_not_write_to_inputs(case):
    tensors = [part.detach() for part in case.inputs(dtype=torch.float32)]
    before = [part.clone() for part in tensors]
    expected = case(*tensors)
    with torch.inference_mode():
        got = case(*tensors)
    assert torch.equal(got, expected)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize('case', BANDED[::4], ids=lambda case: case.name)
def test_shapes_of_gradients_on_the_meta_device(case):
    tensors = [x.detach().to('meta').requires_grad_() for x in case.inputs(dtype=torch.float32)]
    output = case(*tensors)
    gradients = torch.autograd.grad(output, tensors, torch.empty_like(output))
    assert [x.shape for x in gradients] == [x.shape for x in tensors]


def test_keys_are_not_read_where_the_bias_decides(monkeypatch):
    case = next(c for c in BANDED if c.op == 'aft_full' and c.sources)
    *tokens, bias = case.inputs(dtype=torch.float32)
    tokens[1] = tokens[1] + torch.arange(tokens[1].shape[1])[:, None] * 1e4
    expected = case(*tokens, bias)

    def unread(key, dim):
        raise AssertionError('the keys were read')

    monkeypatch.setattr(full_local, 'key_range', unread)
    assert torch.equal(case(*tokens, bias), expected)
    with pytest.raises(AssertionError, match='the keys were read'):
        case(*tokens, 61 * bias.sign())
