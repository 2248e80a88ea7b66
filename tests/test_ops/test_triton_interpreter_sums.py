"""The kernels of AFT-simple, AFT-window and of steps in Triton's interpreter: `interpreted.py`."""

import pytest

from .interpreted import NEEDS_TRITON, assert_passes

# The fewest tests of each file that must pass.
FEWEST = {
    'test_triton_simple.py': 75,
    'test_triton_step.py': 170,
    'test_triton_window.py': 70,
}


@NEEDS_TRITON
@pytest.mark.parametrize('name', FEWEST)
def test_kernels_match_the_oracle_in_the_interpreter(name, root):
    assert_passes(name, FEWEST[name], root)
