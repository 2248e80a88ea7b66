"""The kernels of AFT-simple, the hard window and steps in Triton's interpreter."""

import pytest

from .interpreted import NEEDS_TRITON, assert_passes

# The fewest tests of each file that must pass.
FEWEST = {
    'test_triton_simple.py': 74,
    'test_triton_step.py': 125,
    'test_triton_window.py': 57,
}


@NEEDS_TRITON
@pytest.mark.parametrize('name', FEWEST)
def test_kernels_match_the_oracle_in_the_interpreter(name, root):
    assert_passes(name, FEWEST[name], root)
