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
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# What was found of each constant, by question.
_constants: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# Of the thread or task that records or repeats, so that others decide as they always do.
_recorded: ContextVar[list[bool] | None] = ContextVar('recorded', default=None)
_repeated: ContextVar[Iterator[bool] | None] = ContextVar('repeated', default=None)


def recording() -> bool:
    """Whether decisions are recorded; they may depend on position biases then, not on keys."""
    # A compiled graph decides by itself, and the compiler does not follow context variables.
    return not torch.compiler.is_dynamo_compiling() and _recorded.get() is not None


def repeating() -> bool:
    """Whether decisions are repeated."""
    return not torch.compiler.is_dynamo_compiling() and _repeated.get() is not None


def record(decision: bool) -> bool:
    """Note a decision if they are recorded, and give it back."""
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(decision)
    return decision


def repeat() -> bool:
    """The next decision of those that are repeated; RuntimeError where there is none."""
    decision = next(_repeated.get(), None)
    if decision is None:
        raise RuntimeError('a run took a decision of a model that takes none')
    return decision


@contextmanager
def record_decisions() -> Iterator[list[bool]]:
    """Collect the decisions of a run, taken as if keys spread without bound: they hold for any key.

    Where only keys decide, as in a window without the tokens around it, it is the safe form. What
    is recorded inside of another recording belongs to both.
    """
    outer = _recorded.get()
    recorded: list[bool] = []
    token = _recorded.set(recorded)
    try:
        yield recorded
    finally:
        _recorded.reset(token)
        if outer is not None:
            outer += recorded


@contextmanager
def repeat_decisions(decisions: Sequence[bool]) -> Iterator[None]:
    """Take the decisions of an earlier run in their order, any number of times.

    Raises RuntimeError if the last run took fewer, since it was not a run of the same model then.
    """
    taken = 0

    def again() -> Iterator[bool]:
        nonlocal taken
        while decisions:
            taken += 1
            yield decisions[(taken - 1) % len(decisions)]

    token = _repeated.set(again())
    try:
        yield
    finally:
        _repeated.reset(token)
    if decisions and taken % len(decisions):
        raise RuntimeError(f'a run took {taken} decisions of a model that takes {len(decisions)}')


def constant(x: Tensor) -> Tensor:
    """x, which nobody writes to from now on: an op looks at its values once, not in every call."""
    _constants[x] = {}
    return x


def remembered(x: Tensor, question: Hashable, check: Callable[[], Tensor]) -> Tensor | bool:
    """The answer of ``check()``, which depends on x alone, kept if x is a :func:`constant`."""
    known = not torch.compiler.is_compiling() and x in _constants
    return derived(x, question, lambda: bool(check())) if known else check()


def derived(x: Tensor, name: Hashable, make: Callable[[], Any]) -> Any:
    """``make()``, which depends on x alone, kept if x is a :func:`constant`."""
    kept = None if torch.compiler.is_compiling() else _constants.get(x)
    if kept is None:
        return make()
    if name not in kept:
        with torch.inference_mode(False), torch.no_grad():
            kept[name] = make()
    return kept[name]
