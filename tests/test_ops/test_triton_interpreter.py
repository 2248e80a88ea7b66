"""Runs the parity tests of the Triton kernels on the CPU, in Triton's interpreter.

In a process of their own: whether a kernel is interpreted is settled when it is defined, and the
dispatcher serves every call of an interpreting process with the kernels.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE

# The fewest tests of each file that must pass.
FEWEST = {
    'test_triton_product.py': 85,
    'test_triton_product_op.py': 36,
    'test_triton_normalized.py': 20,
    'test_triton_simple.py': 75,
    'test_triton_step.py': 170,
    'test_triton_window.py': 75,
    'test_triton_conv.py': 58,
}


@pytest.mark.parametrize('name', FEWEST)
@pytest.mark.skipif(importlib.util.find_spec('triton') is None, reason='Triton is not installed')
def test_kernels_match_the_oracle_in_the_interpreter(name, root):
    environment = {
        **os.environ,
        'TRITON_INTERPRET': '1',
        ENVIRONMENT_VARIABLE: 'triton',
        'OMP_NUM_THREADS': '1',
    }
    path = Path(__file__).with_name(name)
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', path]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:]
    passed = re.search(r'(\d+) passed', result.stdout)
    assert passed and int(passed[1]) >= FEWEST[name], result.stdout[-2000:]
