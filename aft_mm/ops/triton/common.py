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


def in_parts(dtype: torch.dtype) -> bool:
    """Whether inputs of the type are too fine for tf32, to whose 10 bits a device cuts operands."""
    return dtype != torch.bfloat16


def product_precision(dtype: torch.dtype) -> str:
    """How `products.multiply` takes the float32 operands made of inputs of the type."""
    return 'tf32x3' if in_parts(dtype) else 'tf32'


def term_dtype(dtype: torch.dtype, save: bool) -> torch.dtype:
    """In which ``e^(k − shift)`` and its product with v are written, to be multiplied.

    float16 ends at 6e-8, far above the smallest of them. Gradients, for which `save` keeps what
    they need, are differences of two products for key and bias, which the rounding of bfloat16,
    here or of n/d, would fill.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 and not save else torch.float32


def once(name: str) -> Callable[..., None]:
    """The gradient of `name`'s gradient: RuntimeError, because a gradient is an op of its own."""

    def refuse(ctx, *gradients: Tensor) -> None:
        raise RuntimeError(
            f'the gradient of {name} of the triton backend is differentiable once; '
            f'AFT_MM_BACKEND=eager serves second derivatives'
        )

    return refuse
