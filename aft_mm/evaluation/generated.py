"""What metrics of generated samples have in common."""

import logging
from collections.abc import Sequence
from typing import Any

from mmengine.logging import print_log


def with_generated(metric: str, results: Sequence[Any]) -> list[Any]:
    """Return the results that are not None; warn if there are none, so the metric is left out.

    A test without samples, ``test_cfg.num_inputs=0``, still measures the likelihood.
    """
    found = [result for result in results if result is not None]
    if not found:
        print_log(
            f'{metric} is left out, because none of {len(results)} samples has generated ones; '
            'a GenerationTestLoop with num_inputs above 0 as test_cfg generates them',
            'current',
            logging.WARNING,
        )
    return found
