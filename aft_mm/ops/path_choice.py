"""The choice between the fast and the safe path of an op, and results cached for a constant.

A fast path is exact to tolerance under a condition on values; :func:`choose` evaluates it. In
an exported graph it is the path of `export_paths.py`.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .export_paths import record, replay
from .tracing import transformed

#: Names the backends to use, see `dispatch.py`.
ENVIRONMENT_VARIABLE = 'AFT_MM_BACKEND'
# Cached results by name.
_constants: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


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
    path = replay()
    if path is not None:
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
    record(holds)
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
