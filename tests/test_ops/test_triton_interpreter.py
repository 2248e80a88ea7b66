"""The kernels of the products in Triton's interpreter; how: `interpreted.py`.

Those of sums are in a file of their own, which another worker of the suite may take.
"""

import pytest

from .interpreted import NEEDS_TRITON, assert_passes

# The fewest tests of each file that must pass.
FEWEST = {
    'test_triton_product.py': 95,
    'test_triton_product_op.py': 36,
    'test_triton_normalized.py': 20,
    'test_triton_conv.py': 34,
}


@NEEDS_TRITON
@pytest.mark.parametrize('name', FEWEST)
def test_kernels_match_the_oracle_in_the_interpreter(name, root):
    assert_passes(name, FEWEST[name], root)
