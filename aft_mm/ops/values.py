import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Values:
    """Copies of tensors on a CPU, to find out whether values changed.

    Version counters do not see collectives, fused optimizers, NumPy or another process.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._guard = guard_tensors(tensors)
        self._copies = [x.detach().clone() for x in tensors]
        self._spans: list[tuple[int, int]] | None = None
        if _memcmp is not None and all(x.is_contiguous() for x in tensors):
            self._spans = [(copy.data_ptr(), copy.nbytes) for copy in self._copies]

    def equal(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are plain tensors of the same shapes, dtypes, strides and values."""
        if len(tensors) != len(self._copies) or not self._guard.check(*tensors):
            return False
        if self._spans is None or _memcmp is None:
            return all(map(torch.equal, tensors, self._copies))
        for x, (copy, size) in zip(tensors, self._spans, strict=True):
            address = x.data_ptr()
            # torch.equal takes 30 times as long for 46,000 numbers.
            if not address or _memcmp(address, copy, size):
                return False
        return True


def guard_tensors(tensors: Sequence[Tensor]) -> Any:
    """Return a guard of types, dtypes, shapes and strides.

    By the dispatch keys of the thread it also sees that torch does more than to compute, such as to
    trace.
    """
    guards: Any = torch._C._dynamo.guards
    return guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(x.shape) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    )


def _find_memcmp() -> Callable[[int, int, int], int] | None:
    if os.name != 'posix':
        return None
    function = ctypes.PyDLL(None).memcmp
    function.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
    return function


_memcmp = _find_memcmp()
