"""Compiles the Triton kernels for devices that this machine need not have.

The launches are those of the ops; only the step to the device is left out. Triton's own ptxas
assembles, and the cubin says whether registers were spilled.
"""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec('triton') is None:
    pytest.skip('Triton is not installed', allow_module_level=True)
from aft_mm.ops import triton_support  # noqa: E402

if triton_support.interpreted():
    pytest.skip("Triton's interpreter does not compile", allow_module_level=True)
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import JITFunction, driver  # noqa: E402

from aft_mm.ops.triton import launch  # noqa: E402

CUOBJDUMP = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
# Bytes of stack per thread, where spilled registers go.
MOST_STACK = 0
KERNELS = {'chunk_sums', 'prefix', 'forward', 'backward_chunk_sums', 'backward'}


class OfflineDriver:
    """Stands for a device of some compute capability."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_device(self):
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget('cuda', self.capability, 32)


@pytest.fixture(params=[80, 90], ids=lambda capability: f'sm_{capability}')
def compiled(request, monkeypatch):
    """Kernels by name, filled as ops are called on CPU tensors."""
    kernels, run = {}, JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernels[self.__name__] = run(self, *args, grid=grid, warmup=True, **options)

    monkeypatch.setattr(JITFunction, 'run', compile_only)
    monkeypatch.setattr(launch, 'wanted_programs', lambda device: 10**6)
    # Setting back what was active would look for a device.
    monkeypatch.setattr(driver, '_active', OfflineDriver(request.param))
    return kernels


def usage(kernel, path):
    """Registers and bytes of stack of each thread."""
    path.write_bytes(kernel.asm['cubin'])
    output = subprocess.run(
        [CUOBJDUMP, '--dump-resource-usage', path], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(number) for name, number in re.findall(r'(REG|STACK|LOCAL):(\d+)', output)}


def call_causal_simple(dtype, channels, gate='sigmoid', masked=False):
    query, key, value, gradient = torch.empty(4, 1, 1024, channels, dtype=dtype).unbind()
    query = None if gate == 'none' else query
    key_mask = torch.ones(1, 1024, dtype=torch.bool) if masked else None
    _, saved = launch.causal_simple_forward(query, key, value, key_mask, gate, True)
    launch.causal_simple_backward(gradient, saved, query, key, value, key_mask, gate)


def assert_no_spills(kernels, folder):
    assert set(kernels) == KERNELS
    for name, kernel in kernels.items():
        found = usage(kernel, folder / f'{name}.cubin')
        assert found['STACK'] <= MOST_STACK and found['LOCAL'] == 0, (name, found)


@pytest.mark.parametrize('channels', [32, 64])
@pytest.mark.parametrize('dtype', triton_support.DTYPES, ids=str)
def test_every_kernel_type_and_block(dtype, channels, compiled, tmp_path):
    call_causal_simple(dtype, channels)
    assert_no_spills(compiled, tmp_path)


# 65 channels: rows that no vector of numbers is aligned to.
@pytest.mark.parametrize('channels, gate, masked', [(64, 'relu', True), (65, 'none', False)])
def test_gates_masks_and_odd_sizes(channels, gate, masked, compiled, tmp_path):
    call_causal_simple(torch.bfloat16, channels, gate, masked)
    assert_no_spills(compiled, tmp_path)


def test_a_row_is_one_access(compiled):
    """Both channels of a thread at once: query, key and value per token, three parts of the sum."""
    call_causal_simple(torch.bfloat16, 64)
    loads = re.findall(r'ld\.global\S*', compiled['forward'].asm['ptx'])
    assert len(loads) == 3 * launch.ROWS + 3
