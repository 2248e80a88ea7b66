"""What the launches and the torch.library boundary of every kernel share, on the host."""

from collections.abc import Callable

import torch
from torch import Tensor


def strided(x: Tensor | None) -> tuple | None:
    """A tensor as kernels take it, (pointer, *strides); None stays None."""
    return None if x is None else (x, *x.stride())


def count_processors(device: torch.device) -> int:
    """Multiprocessors of the device; the interpreter has one."""
    if device.type != 'cuda':
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def once(name: str) -> Callable[..., None]:
    """The gradient of `name`'s gradient: RuntimeError, because a gradient is an op of its own."""

    def refuse(ctx, *gradients: Tensor) -> None:
        raise RuntimeError(
            f'the gradient of {name} of the triton backend is differentiable once; '
            f'AFT_MM_BACKEND=eager serves second derivatives'
        )

    return refuse
