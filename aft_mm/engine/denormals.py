"""Numbers so close to 0 that a CPU computes with them slowly."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    """Treat float32 numbers below 1.2e-38 as 0 on a CPU, in this thread and those that it starts.

    Gradients are as small where a loss at the last of many tokens passes through a recurrence, and
    make the update of an LSTM several times as long.
    """
    before = torch.full((), 1e-40).mul(1).item() == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
