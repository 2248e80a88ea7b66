"""Decisions between forms of an op that are taken once: for a graph, and for a constant.

A graph, such as an exported one, cannot look at values. A run of the model on real tensors records
what it decided, tracing repeats it::

    with record_decisions() as decisions:
        model(example)
    with repeat_decisions(decisions):
        program = torch.export.export(model, (example,))

And to look at values is to wait for the device. What was found of a :func:`constant` is remembered.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# What was found of each constant, by question.
_constants: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
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


def constant(x: Tensor) -> Tensor:
    """x, which nobody writes to from now on: an op looks at its values once, not in every call."""
    _constants[x] = {}
    return x


def remembered(x: Tensor, question: Hashable, check: Callable[[], Tensor]) -> Tensor | bool:
    """The answer of ``check()``, which depends on x alone, kept if x is a :func:`constant`."""
    answers = None if torch.compiler.is_compiling() else _constants.get(x)
    if answers is None:
        return check()
    if question not in answers:
        answers[question] = bool(check())
    return answers[question]
