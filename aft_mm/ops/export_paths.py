"""The paths of a run on real tensors, which an exported graph replays.

Such a graph cannot read values (docs/export.md has an example).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ..checks import check_choice, check_flag

# Other threads and tasks keep choosing by value.
_recorded: ContextVar[list[bool] | None] = ContextVar('recorded', default=None)
_replayed: ContextVar[Iterator[bool] | None] = ContextVar('replayed', default=None)
_runtime: ContextVar[tuple[str, bool]] = ContextVar('runtime', default=('torch', False))
#: Runtimes that an exported graph can be for.
RUNTIMES = ('torch', 'onnxruntime', 'openvino')


def recording() -> bool:
    """Return whether paths are recorded, which then do not depend on keys."""
    return not torch.compiler.is_dynamo_compiling() and _recorded.get() is not None


def replaying() -> bool:
    return not torch.compiler.is_dynamo_compiling() and _replayed.get() is not None


def export_stage() -> str | None:
    """Return 'recording', or the runtime of a replay; None outside of both."""
    if torch.compiler.is_dynamo_compiling():
        return None
    if _replayed.get() is not None:
        return _runtime.get()[0]
    return None if _recorded.get() is None else 'recording'


def exports_loops() -> bool:
    """Return whether a replayed AFT-conv is the operator `aft_mm::AFTConv`."""
    return not torch.compiler.is_dynamo_compiling() and _runtime.get()[1]


def record(path: bool) -> None:
    """Record a path, True for fast, if paths are recorded."""
    if torch.compiler.is_dynamo_compiling():  # which cannot trace a context variable
        return
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(path)


def replay() -> bool | None:
    """Return the next recorded path, True for fast; None if none are replayed."""
    if torch.compiler.is_dynamo_compiling():
        return None
    replayed = _replayed.get()
    if replayed is None:
        return None
    path = next(replayed, None)
    if path is None:
        raise RuntimeError('replay_paths got no paths, but the run chose one')
    return path


@contextmanager
def record_paths() -> Iterator[list[bool]]:
    """Record the paths of a run, chosen as if the range of the keys was unbounded.

    An outer recording also gets the paths of a nested one.

    Yields:
        The growing list of the paths, True for fast.
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
def replay_paths(
    paths: Sequence[bool], runtime: str = 'torch', loops: bool = False
) -> Iterator[None]:
    """Replay the paths of :func:`record_paths` in order, for any number of runs.

    Args:
        paths: The list that :func:`record_paths` yielded.
        runtime: 'torch', 'onnxruntime' or 'openvino', in which the graph is fast; it is right in
            all.
        loops: Whether the fast path of AFT-conv is an operator in C++, for ONNX Runtime or
            OpenVINO, from the library that `aft_mm export --loops` writes.

    Raises:
        RuntimeError: If the runs took another number of paths.
    """
    check_choice('runtime', runtime, RUNTIMES)
    check_flag('loops', loops)
    if loops and runtime == 'torch':
        raise ValueError("runtime must be 'onnxruntime' or 'openvino' for loops=True, got 'torch'")
    taken = 0

    def cycle() -> Iterator[bool]:
        nonlocal taken
        while paths:
            taken += 1
            yield paths[(taken - 1) % len(paths)]

    token, runtime_token = _replayed.set(cycle()), _runtime.set((runtime, loops))
    try:
        yield
    finally:
        _replayed.reset(token)
        _runtime.reset(runtime_token)
    if paths and taken % len(paths):
        raise RuntimeError(
            f'replay_paths must get the paths of the same model, got {len(paths)} for a run that '
            f'chose {taken}'
        )
