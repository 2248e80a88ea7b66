"""Shared parts of the tests that compare Triton kernels with the float64 oracle.

They run on a CUDA device with ``pytest -m cuda``; without one, `test_triton_interpreter.py` runs
the files with ``TRITON_INTERPRET=1``. Without either, importing this module skips a file.
"""

import pytest
import torch

from aft_mm.ops.triton import availability as triton_availability

from ..helpers import nightly
from .cases import TOLERANCE, run_with_gradients
from .test_backends import assert_close, oracle

INTERPRETED = triton_availability.interpreted()
DEVICE = 'cpu' if INTERPRETED else 'cuda'
MARKS = [
    pytest.mark.cuda,
    pytest.mark.usefixtures('triton_asked_for', 'cuts'),
    # Empty sums have the lowest float32 number, so differences to large keys overflow as intended;
    # and the sigmoid of a large negative number is 1 / inf.
    pytest.mark.filterwarnings('ignore:overflow encountered in'),
]
LACKS = triton_availability.machine_reasons(DEVICE, None)
if LACKS:
    pytest.skip(f'needs a CUDA device or TRITON_INTERPRET=1: {LACKS[0]}', allow_module_level=True)

DTYPES = pytest.mark.parametrize('dtype', triton_availability.DTYPES, ids=str)
BFLOAT16 = pytest.mark.parametrize(
    'dtype', nightly(triton_availability.DTYPES, lambda dtype: dtype != torch.bfloat16), ids=str
)
# One key takes all the weight: see test_numerics.py.
TERMS = 1.0


def on_device(tensors):
    return [x.detach().to(DEVICE) for x in tensors]


def inputs(case, batch=2, dtype=torch.float32, bias_scale=1.0):
    return on_device(case.inputs(batch, dtype, bias_scale))


def compare(case, tensors, monkeypatch, floor=1e-3, **extra):
    got = run_with_gradients(case, tensors, **extra)
    dtype = tensors[-1].dtype
    assert [x.dtype for x in got] == [dtype, *(x.dtype for x in tensors)]
    assert_close(got, oracle(case, tensors, monkeypatch, **extra), TOLERANCE[dtype], floor)
    return got


def layouts(tensors):
    """Return equal tensors with other strides: tokens first, channels first, every other entry."""
    query, key, value = tensors
    every_other = torch.full((*value.shape[:2], 2 * value.shape[2]), torch.nan).to(value)
    every_other[..., ::2] = value
    return [
        query.transpose(0, 1).contiguous().transpose(0, 1),
        key.transpose(1, 2).contiguous().transpose(1, 2),
        every_other[..., ::2],
    ]
