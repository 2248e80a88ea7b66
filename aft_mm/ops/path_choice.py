from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .export_paths import record, replay
from .tracing import compiling_not_exporting, transformed


def choose(
    condition: Tensor | bool,
    fast: Callable[..., Tensor],
    safe: Callable[..., Tensor],
    *operands: Tensor,
) -> Tensor:
    """Return ``fast(*operands)`` if the scalar condition holds, else ``safe(*operands)``.

    A graph chooses by torch.cond when it runs, unless the condition is a bool.

    Args:
        condition: Whether `fast` is exact to tolerance; `safe` is for any finite input.
        operands: Tensors that torch.cond can trace.
    """
    path = replay()
    if path is not None:
        return fast(*operands) if path else safe(*operands)
    if torch.compiler.is_compiling() and not isinstance(condition, bool):
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            return _choose_in_training_graph(condition, fast, safe, operands)
        chosen: Tensor = torch.cond(condition, _contiguous(fast), _contiguous(safe), operands)
        return chosen
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
    # As lists of ints, and not read from tensors inside, which a branch of torch.cond refuses.
    shapes, count = [[*x.shape] for x in operands], result.numel()

    def zeros(*flat: Tensor) -> Tensor:
        return flat[0].new_zeros(count)

    def otherwise(*flat: Tensor) -> Tensor:
        given = (x.view(shape) for x, shape in zip(flat, shapes, strict=True))
        return safe(*given).flatten()

    # Results and gradients are flat: torch.cond does not compare strides of open sizes.
    other = torch.cond(condition, zeros, otherwise, tuple(x.flatten() for x in operands))
    return torch.where(condition, result, other.view(result.shape))


def _contiguous(path: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def branch(*operands: Tensor) -> Tensor:
        result = path(*operands)
        # torch.export compares strides as formulas of open sizes, which only a new tensor makes equal.
        return (
            result.contiguous()
            if compiling_not_exporting()
            else result.clone(memory_format=torch.contiguous_format)
        )

    return branch
