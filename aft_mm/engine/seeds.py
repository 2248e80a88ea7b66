"""Seeds that differ where the noise must."""

import numpy as np


def derived_seed(seed: int, *parts: int) -> int:
    """A seed of 63 bits for one of many draws: the same for the same numbers, else unrelated.

    Args:
        seed: That of the whole, 0 or larger.
        *parts: What tells this draw from the others, such as rank and batch; 0 or larger.
    """
    return int(np.random.SeedSequence([seed, *parts]).generate_state(1, np.uint64)[0]) >> 1
