"""The tests of the Triton kernels in Triton's interpreter on the CPU.

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

from ..helpers import nightly

pytestmark = pytest.mark.slow

NAMES = ['contract', 'conv', 'pairs', 'product', 'simple', 'step']
# Tests that must pass.
FEWEST = {'not nightly': 180, 'nightly': 50}


@pytest.mark.skipif(importlib.util.find_spec('triton') is None, reason='Triton is not installed')
@pytest.mark.parametrize('marks', nightly(FEWEST, ['nightly']))
def test_kernels_match_the_oracle_in_the_interpreter(marks, root):
    environment = dict(os.environ, TRITON_INTERPRET='1', OMP_NUM_THREADS='1')
    environment[ENVIRONMENT_VARIABLE] = 'triton'
    files = [Path(__file__).with_name(f'test_triton_{name}.py') for name in NAMES]
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', marks, *files]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:]
    passed = re.search(r'(\d+) passed', result.stdout)
    assert passed and int(passed[1]) >= FEWEST[marks], result.stdout[-2000:]
