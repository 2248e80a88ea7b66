from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .export_paths import export_stage

Function = TypeVar('Function', bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """``torch.compiler.assume_constant_result`` without the slow import of the compiler."""
    vars(function).update(_dynamo_marked_constant=True)
    return function


def compiling_not_exporting() -> bool:
    """Return whether torch.compile makes a graph, which it makes again if a constant changes."""
    return torch.compiler.is_dynamo_compiling() and not _exporting()


# Traced, is_exporting would always be True.
@constant
def _exporting() -> bool:
    return torch.compiler.is_exporting()


def transformed() -> bool:
    """Return whether torch.func or forward mode is active, for any tensor."""
    if torch._C._are_functorch_transforms_active():
        return True
    return not torch.compiler.is_dynamo_compiling() and forward_ad._current_level >= 0


def clipped(steps: int, length: int) -> int:
    """Return `steps` within ±length.

    In a branch of torch.cond, torch.export computes the `max` of a size and a number as their `min`.
    """
    bounded = min(length, abs(steps))
    return bounded if steps > 0 else -bounded


def only_computes() -> bool:
    """Return whether an operation only computes now: in no graph, transform, export or mode."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or export_stage():
        return False
    return not transformed() and torch._C._len_torch_dispatch_stack() == 0


def may_read(x: Tensor) -> bool:
    """Return whether the value of x may be read now: outside of graphs and of torch.func."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or export_stage():
        return False
    return not x.is_meta and torch.func.debug_unwrap(x) is x


def no_autocast(value: Tensor) -> AbstractContextManager[Any]:
    """Return a context without autocast, which would round float32 products to bfloat16.

    Entering one takes as long as three small products, so only where needed; meta has no autocast.
    """
    device = value.device.type
    if value.is_meta or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device)):
        return nullcontext()
    return torch.autocast(device, enabled=False)
