"""AFT-conv as a dense product per head: W [h, T, T] is the kernel laid out along diagonals."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..online_softmax import column_shift, mean
from .bf16_matmul import RoundedProduct, multiply, split_terms

# Largest W in float32.
MOST_WEIGHT_BYTES = 2**31
# Rates of an H100 per second, nominal but for the convolution of large kernels, which was measured.
PRODUCT_RATE = {'fp32': 50e12, 'bf16': 700e12, 'bf16x2': 350e12}
CONVOLUTION_RATE = 0.3e12
BYTE_RATE = 3e12
# Bytes per float32 element of e^k v and e^k.
CONVOLUTION_BYTES = 25 * 8
PRODUCT_BYTES = 10 * 8
# Bytes per entry of W that are read and written, without and with a gradient.
WEIGHT_BYTES, TRAINED_WEIGHT_BYTES = 16, 56


def is_applicable(value: Tensor, weight: Tensor, grid: Sequence[int], precision: str) -> bool:
    tokens, heads = math.prod(grid), weight.shape[0]
    if value.device.type != 'cuda' or 4 * heads * tokens**2 > MOST_WEIGHT_BYTES:
        return False
    elements = value.shape[0] * tokens * (value.shape[2] + heads)
    product = 2 * tokens * elements / PRODUCT_RATE[precision]
    weight_bytes = TRAINED_WEIGHT_BYTES if torch.is_grad_enabled() else WEIGHT_BYTES
    product += (PRODUCT_BYTES * elements + weight_bytes * heads * tokens**2) / BYTE_RATE
    convolution = 2 * math.prod(weight.shape[1:]) * elements / CONVOLUTION_RATE
    return product < convolution + CONVOLUTION_BYTES * elements / BYTE_RATE


def dense_mean(
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool,
    causal: bool,
    precision: str,
) -> Tensor:
    """Return ``Σ W e^k v / Σ W e^k`` [B, T, D] of key [B, T, h], −inf where hidden."""
    batch, heads = len(key), key.shape[-1]
    kernel = torch.exp(weight)
    kernel = kernel.bfloat16() if precision == 'bf16' else kernel
    weights = toeplitz(kernel, grid, global_connectivity)
    if causal:
        weights = weights.tril()
    exp_key = torch.exp(key - column_shift(key, 1)).unsqueeze(-1)
    terms = [exp_key * value.unflatten(-1, (heads, -1)), exp_key]
    terms = [x.permute(2, 1, 0, 3).flatten(2) for x in terms]  # [h, T, B·d] and [h, T, B]
    if precision == 'bf16x2':
        numerator, denominator = RoundedProduct.apply(weights, *terms)
    else:
        sums = multiply(weights, split_terms(torch.cat(terms, 2), precision))
        numerator, denominator = sums.split([x.shape[2] for x in terms], 2)
    numerator, denominator = (x.unflatten(2, (batch, -1)) for x in (numerator, denominator))
    return mean(numerator, denominator).permute(2, 1, 0, 3).flatten(2)


def toeplitz(kernel: Tensor, grid: Sequence[int], outside: float) -> Tensor:
    """Return the kernel [h, *K] as a matrix [h, T, T], `outside` where it does not reach."""
    padding = []
    for size, length in zip(kernel.shape[:0:-1], reversed(grid), strict=True):
        padding += [length - 1 - size // 2] * 2
    return _Toeplitz.apply(F.pad(kernel, padding, value=float(outside)), tuple(grid))


class _Toeplitz(torch.autograd.Function):
    """``y[t, t'] = x[t' − t]`` in every dimension of the grid, x [h, 2n − 1, ...].

    The gradient of autograd would add by atomics.
    """

    apply: ClassVar[Callable[..., Tensor]]

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, grid: tuple[int, ...]) -> Tensor:
        # By index, as Inductor would write views of x to memory twice.
        token = torch.arange(math.prod(grid), device=x.device)
        entry: Tensor | int = 0
        stride = 1
        for length in reversed(grid):
            position = token % length
            entry = entry + stride * (position - position[:, None] + length - 1)
            token, stride = token // length, stride * (2 * length - 1)
        return x.flatten(1)[:, entry]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.grid = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dims = len(ctx.grid)
        grad = grad.view(-1, *ctx.grid, *ctx.grid)
        for dim in range(1, dims + 1):
            pair = grad.movedim((dim, dims + 1), (-2, -1))
            grad = _diagonal_sums(pair).movedim(-1, dim)
        return grad, None


def _diagonal_sums(x: Tensor) -> Tensor:
    """Return the sums over the 2n − 1 diagonals of x [..., n, n], read with rows longer by one."""
    length = x.shape[-1]
    rows = F.pad(x, (length - 1, 0)).flatten(-2)
    sums: Tensor = F.pad(rows, (0, length)).unflatten(-1, (length, 2 * length)).sum(-2)
    return sums[..., :-1]
