"""The default backend against the float64 oracle: forward and every gradient."""

import pytest
import torch

from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.eager import banded_product

from . import cases
from .cases import CASES, IDS, Case, run_with_gradients


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    torch.manual_seed(0)
    # What the loops in C++ serve, test_native.py asks them.
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'eager')


def oracle(case: Case, tensors, monkeypatch, **extra):
    """The reference backend on the same inputs in float64."""
    wide = [tensor.double() for tensor in tensors]
    with monkeypatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, 'reference')
        return run_with_gradients(case, wide, **extra)


def assert_close(got, expected, relative, floor=1e-3):
    """Errors against the largest entry of each tensor, or `floor` if that is larger."""
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.isfinite(a).all(), f'tensor {index} is not finite'
        scale = b.abs().max().clamp_min(floor)
        error = (a.double() - b).abs().max() / scale
        assert error <= relative, f'tensor {index}: relative error {error:.2e} > {relative:.0e}'


# The types that eager is tested in.
TOLERANCE = {k: v for k, v in cases.TOLERANCE.items() if k != torch.float16}


@pytest.mark.parametrize('dtype', TOLERANCE, ids=str)
@pytest.mark.parametrize('case', CASES, ids=IDS)
def test_matches_oracle(case, dtype, monkeypatch):
    tensors = case.inputs(dtype=dtype)
    assert_close(
        run_with_gradients(case, tensors), oracle(case, tensors, monkeypatch), TOLERANCE[dtype]
    )


BANDED = [case for case in CASES if case.op in ('aft_full', 'aft_local')]


@pytest.mark.parametrize('case', BANDED, ids=lambda case: case.name)
def test_a_banded_mean_in_parts_is_the_same(case, monkeypatch):
    tensors = case.inputs(dtype=torch.float32)
    expected = oracle(case, tensors, monkeypatch)
    monkeypatch.setattr(banded_product, 'CHUNK', 1)
    monkeypatch.setattr(banded_product, 'SMALLEST_WIDTH', 5)  # of 12 columns: two parts and a rest
    assert_close(run_with_gradients(case, tensors), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize('case', CASES, ids=IDS)
def test_inference_gives_the_same_and_leaves_its_inputs_alone(case):
    tensors = [part.detach() for part in case.inputs(dtype=torch.float32)]
    before = [part.clone() for part in tensors]
    expected = case(*tensors)
    with torch.inference_mode():
        got = case(*tensors)
    assert torch.equal(got, expected)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
