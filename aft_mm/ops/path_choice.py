"""The choice between the fast and the safe path of an op, and results cached for a constant.

A fast path is exact to tolerance under a condition on values; :func:`choose` evaluates it. An
exported graph cannot read values, so it replays the paths of a run on real tensors::

    with record_paths() as paths:
        model(example)
    with replay_paths(paths):
        program = torch.export.export(model, (example,))
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.weak import WeakTensorKeyDictionary

from ..checks import check_choice, check_flag
from .triton.availability import constant

#: Names the backends to use, see `dispatch.py`.
ENVIRONMENT_VARIABLE = 'AFT_MM_BACKEND'
# Cached results by name.
_constants: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
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
    """Return whether recorded paths are replayed."""
    return not torch.compiler.is_dynamo_compiling() and _replayed.get() is not None


def export_stage() -> str | None:
    """Return 'recording', or the runtime of a replay; None outside of both.

    In both, the graph must not depend on the sizes of the example.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    if _replayed.get() is not None:
        return _runtime.get()[0]
    return None if _recorded.get() is None else 'recording'


def exports_loops() -> bool:
    """Return whether a replayed AFT-conv is the operator `aft_mm::AFTConv`."""
    return not torch.compiler.is_dynamo_compiling() and _runtime.get()[1]


def compiling_not_exporting() -> bool:
    """Return whether torch.compile makes a graph, which it makes again if a constant changes."""
    return torch.compiler.is_dynamo_compiling() and not _exporting()


# Traced, is_exporting would always be True.
@constant
def _exporting() -> bool:
    return torch.compiler.is_exporting()


def transformed() -> bool:
    """Return whether torch.func or forward mode is active, for any tensor.

    Both refuse an autograd function without their rules, also one that sees plain tensors.
    """
    if torch._C._are_functorch_transforms_active():
        return True
    return not torch.compiler.is_dynamo_compiling() and forward_ad._current_level >= 0


def may_read(x: Tensor) -> bool:
    """Return whether the value of x may be read now: outside of graphs and of torch.func."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or export_stage():
        return False
    return not x.is_meta and torch.func.debug_unwrap(x) is x


def choose(
    condition: Tensor | bool,
    fast: Callable[..., Tensor],
    safe: Callable[..., Tensor],
    *operands: Tensor,
) -> Tensor:
    """Return ``fast(*operands)`` if the scalar condition holds, else ``safe(*operands)``.

    A graph chooses by torch.cond when it runs, unless the condition is a bool.

    Args:
        condition: Whether `fast` is exact to tolerance.
        fast: The fast path.
        safe: The path that is exact for any finite input.
        operands: Tensors that torch.cond can trace.
    """
    recorded = replayed = None
    if not torch.compiler.is_dynamo_compiling():  # which cannot trace a context variable
        recorded, replayed = _recorded.get(), _replayed.get()
    if replayed is not None:
        path = next(replayed, None)
        if path is None:
            raise RuntimeError('replay_paths got no paths, but the run chose one')
        return fast(*operands) if path else safe(*operands)
    if torch.compiler.is_compiling() and not isinstance(condition, bool):
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            return _choose_in_training_graph(condition, fast, safe, operands)
        return torch.cond(condition, _contiguous(fast), _contiguous(safe), operands)
    if isinstance(condition, Tensor):
        if condition.is_meta:
            return fast(*operands)
        try:
            holds = bool(condition)
        except RuntimeError:
            if not transformed():
                raise
            holds = False  # torch.func.vmap hides the value
    else:
        holds = condition
    if recorded is not None:
        recorded.append(holds)
    return fast(*operands) if holds else safe(*operands)


def _choose_in_training_graph(
    condition: Any,
    fast: Callable[..., Tensor],
    safe: Callable[..., Tensor],
    operands: tuple[Tensor, ...],
) -> Tensor:
    """Choose in a compiled graph with a gradient.

    The backward pass of torch.cond runs its branches again, so `fast` stays outside, on zeros where
    the condition fails.
    """
    result = fast(*(torch.where(condition, x, 0) for x in operands))

    def zeros(*operands: Tensor) -> Tensor:
        return operands[0].new_zeros(result.shape)

    return torch.where(condition, result, torch.cond(condition, zeros, _contiguous(safe), operands))


def _contiguous(path: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a branch of torch.cond, whose results must have the same strides."""

    def branch(*operands: Tensor) -> Tensor:
        return path(*operands).contiguous()

    return branch


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
        runtime: 'torch', 'onnxruntime' or 'openvino'. The graph is right in all of them and fast in
            this one.
        loops: Whether the fast path of AFT-conv is an operator in C++, for ONNX Runtime or OpenVINO,
            which needs the library that `aft_mm export --loops` writes.

    Raises:
        RuntimeError: If the runs took another number of paths.
        ValueError: If `runtime` is another word, or 'torch' with `loops`.
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


class Snapshot:
    """Tells whether tensors were replaced or written to since, except through ``data``.

    It keeps their memory, so no other tensor gets their addresses.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [x.detach() for x in tensors]
        self.state = [(x.data_ptr(), x._version, x.dtype, x.shape, x.stride()) for x in tensors]

    def is_valid(self, tensors: Iterable[Tensor | None]) -> bool:
        """Compare with tensors in the same order, without those that are None."""
        state = iter(self.state)
        for x in tensors:
            if x is None:
                continue
            address, version, dtype, shape, strides = next(state, (0, 0, None, (), ()))
            if x.dtype != dtype or x.is_inference() or x._version != version:
                return False
            if x.data_ptr() != address or x.shape != shape or x.stride() != strides:
                return False
        return next(state, None) is None


def mark_constant(x: Tensor) -> Tensor:
    """Mark a tensor as never written to again, so that ops cache results from it; return it.

    Reading a value would otherwise synchronise with the device in every call.
    """
    _constants[x] = {}
    return x


def cached(x: Tensor, name: Hashable, make: Callable[[], Any]) -> Any:
    """Return ``make()``, which depends on x alone, cached under `name` if x is constant."""
    results = None if torch.compiler.is_compiling() else _constants.get(x)
    if results is None:
        return make()
    if name not in results:
        with torch.inference_mode(False), torch.no_grad():
            results[name] = make()
    return results[name]


def find_cached(x: Tensor, name: Hashable) -> Any:
    """Return what :func:`cached` cached, or None."""
    return (_constants.get(x) or {}).get(name)


def cached_check(
    x: Tensor, name: tuple[Hashable, ...], check: Callable[..., Tensor], **options: Hashable
) -> Tensor | bool:
    """Return ``check(**options)``, for a constant x its cached value as a bool."""
    if torch.compiler.is_compiling() or x not in _constants:
        return check(**options)
    return cached(x, (*name, *options.values()), lambda: bool(check(**options)))
