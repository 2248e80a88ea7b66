"""Fixtures of the tests of the ops."""

import pytest
import torch

from aft_mm.ops import triton_support
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE


@pytest.fixture
def triton_asked_for(monkeypatch):
    """The Triton kernels serve, or the call fails with the reasons; and a seed."""
    torch.manual_seed(0)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, 'triton')


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
