"""Decisions between forms of an op for a graph that cannot look at values, such as an exported one.

A run of the model on real tensors records them, tracing repeats them::

    with record_decisions() as decisions:
        model(example)
    with repeat_decisions(decisions):
        program = torch.export.export(model, (example,))
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_recorded: list[bool] | None = None
_repeated: Iterator[bool] | None = None


def recording() -> bool:
    """Whether decisions are recorded; they may depend on position biases then, not on keys."""
    return _recorded is not None


def repeating() -> bool:
    """Whether decisions are repeated."""
    return _repeated is not None


def record(decision: bool) -> bool:
    """Note a decision if they are recorded, and give it back."""
    if _recorded is not None:
        _recorded.append(decision)
    return decision


def repeat() -> bool:
    """The next decision of those that are repeated."""
    return next(_repeated)


@contextmanager
def record_decisions() -> Iterator[list[bool]]:
    """Collect the decisions of a run, taken as if keys spread without bound: they hold for any key.

    Where only keys decide, as in a window without the tokens around it, it is the safe form.
    """
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


@contextmanager
def repeat_decisions(decisions: Sequence[bool]) -> Iterator[None]:
    """Take the decisions of an earlier run in their order, any number of times.

    Raises RuntimeError if the last run took fewer, since it was not a run of the same model then.
    """
    global _repeated
    taken = 0

    def again() -> Iterator[bool]:
        nonlocal taken
        while decisions:
            taken += 1
            yield decisions[(taken - 1) % len(decisions)]

    _repeated = again()
    try:
        yield
    finally:
        _repeated = None
    if decisions and taken % len(decisions):
        raise RuntimeError(f'a run took {taken} decisions of a model that takes {len(decisions)}')
