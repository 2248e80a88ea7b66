"""Matrix products of kernels, on tensor cores."""

import triton
import triton.language as tl

from .support import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def multiply(a, b, total, PRECISION: tl.constexpr):
    """``total + a b``, summed in float32."""
    if INTERPRETED:  # which multiplies the bits of bfloat16
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)
