"""Report once whether the tests of detection and segmentation run."""

import pytest


def test_downstream_tests_run(missing_downstream):
    if missing_downstream:
        pytest.skip(
            f'tests/downstream is left out without {", ".join(missing_downstream)}, '
            'which `make downstream` installs'
        )
