"""The product kernels in Triton's interpreter, see `interpreted.py`.

The other kernels have their own file, so that another worker of the suite can run it.
"""

import pytest

from .interpreted import NEEDS_TRITON, assert_passes

# The fewest tests of each file that must pass.
FEWEST = {
    'test_triton_product.py': 70,
    'test_triton_product_op.py': 32,
    'test_triton_local_learned.py': 18,
    'test_triton_conv.py': 30,
}


@NEEDS_TRITON
@pytest.mark.parametrize('name', FEWEST)
def test_kernels_match_the_oracle_in_the_interpreter(name, root):
    assert_passes(name, FEWEST[name], root)
