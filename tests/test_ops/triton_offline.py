"""Compile Triton kernels for devices that this machine does not have; fixture `compiled`.

The ops launch the kernels as usual, without running them. Triton's ptxas assembles them, and the
cubin shows whether registers were spilled.
"""

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget

CUOBJDUMP = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
# Bytes of stack per thread, which holds spilled registers.
MOST_STACK = 0


class OfflineDriver:
    def __init__(self, capability):
        self.capability = capability

    def get_current_device(self):
        return self.capability  # compiled kernels are cached per device

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget('cuda', self.capability, 32)


def compiled_for(*capabilities):
    ids = [f'sm_{capability}' for capability in capabilities]
    return pytest.mark.parametrize('compiled', capabilities, indirect=True, ids=ids)


def usage(kernel, path):
    path.write_bytes(kernel.asm['cubin'])
    output = subprocess.run(
        [CUOBJDUMP, '--dump-resource-usage', path], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(number) for name, number in re.findall(r'(REG|STACK|LOCAL):(\d+)', output)}


def load_widths(kernel):
    loads = re.findall(r'ld\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)\b', kernel.asm['ptx'])
    return Counter(int(numbers or 1) * int(bits) // 8 for numbers, bits in loads)


def widest_load(kernel):
    return max(load_widths(kernel))


def narrowest_load(kernel):
    return min(load_widths(kernel))


def assert_no_spills(kernels, expected, folder):
    assert set(kernels) == set(expected)
    for name, kernel in kernels.items():
        found = usage(kernel, folder / f'{name}.cubin')
        assert found['STACK'] <= MOST_STACK and found['LOCAL'] == 0, (name, found)
