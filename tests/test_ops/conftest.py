"""Fixtures of the tests of the ops."""

import numpy as np
import pytest
import torch

from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.triton import support as triton_support


@pytest.fixture
def triton_asked_for(monkeypatch):
    """The Triton kernels serve, or the call fails with the reasons; and a seed.

    The interpreter multiplies tf32 operands as they are; here it cuts them as a device does.
    """
    torch.manual_seed(0)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'triton')
    if triton_support.interpreted():
        from triton.runtime.interpreter import InterpreterBuilder

        exact = InterpreterBuilder.create_dot

        def create_dot(self, a, b, total, precision, most):
            if precision.name == 'TF32':
                a, b = (type(x)(_cut_to_tf32(x.data), x.dtype) for x in (a, b))
            return exact(self, a, b, total, precision, most)

        monkeypatch.setattr(InterpreterBuilder, 'create_dot', create_dot)


def _cut_to_tf32(x):
    """float32 numbers without the last 13 bits of their mantissa."""
    return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


@pytest.fixture(params=[80, 90], ids=lambda capability: f'sm_{capability}')
def compiled(request, monkeypatch):
    """Triton kernels by name, compiled as the ops are called on CPU tensors."""
    pytest.importorskip('triton', reason='Triton is not installed')
    if triton_support.interpreted():
        pytest.skip("Triton's interpreter does not compile")
    from triton.runtime import JITFunction, driver

    from .triton_offline import OfflineDriver

    kernels, run = {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels[self.__name__] = run(self, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, 'run', compile_only)
    # Setting back what was active would look for a device.
    monkeypatch.setattr(driver, '_active', OfflineDriver(request.param))
    return kernels


@pytest.fixture
def cuts(request, monkeypatch):
    """Products in tiles of 32 tokens and channels, or in those of the devices with 'shipped'."""
    if getattr(request, 'param', 'small') == 'shipped':
        return
    from aft_mm.ops.triton import product_cut, product_launch

    sizes = dict(tile=32, width=32, step=16, warps=4)
    small = {kind: cut._replace(**sizes) for kind, cut in product_cut.CUTS.items()}
    monkeypatch.setattr(product_cut, 'CUTS', small)
    if triton_support.interpreted():  # which takes its time for each step, not for what is in it
        monkeypatch.setattr(product_launch, 'SOME', 32)
        monkeypatch.setattr(product_launch, 'ROWS_WEIGHED', 32)
