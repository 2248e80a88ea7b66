"""Run a file of parity tests of the Triton kernels in Triton's interpreter on the CPU.

This needs its own process, because a kernel is either interpreted or compiled from its definition
on.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE

NEEDS_TRITON = pytest.mark.skipif(
    importlib.util.find_spec('triton') is None, reason='Triton is not installed'
)


def assert_passes(name, fewest, root):
    """Assert that all tests of the file pass, and that there are at least `fewest`."""
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
    assert passed and int(passed[1]) >= fewest, result.stdout[-2000:]
