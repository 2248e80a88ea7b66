"""Products of weights W with terms, (e^k v, e^k) say, in the precision that the tokens ask for.

float32 operands are multiplied as they are, and torch's switches decide about tf32. Of bfloat16
tokens on CUDA, which are rounded to 8 bits already, tensor cores multiply bfloat16 operands and add
in float32:

- without a gradient W and terms are rounded once;
- with one, W is rounded once and the terms come in two parts of 8 bits each. Gradients are
  differences of products with the same W, so what its rounding did cancels as it should, while
  that of the terms, or of tf32, would stay. The gradient of W is a product of two such terms.

The worst gradient is then off by 1.4 times the rounding of the result to bfloat16, where bfloat16
terms are off by 3.4 and by 26 if values are close, tf32 by 0.5 and 3.9 (docs/ops.md).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .sums import transformed


def term_parts(value: Tensor) -> int:
    """The parts that terms of these tokens are multiplied in; 0 leaves the operands as they are."""
    if value.device.type != 'cuda' or value.dtype != torch.bfloat16 or transformed(value):
        return 0
    return 2 if torch.is_grad_enabled() else 1


def in_parts(x: Tensor, parts: int) -> list[Tensor]:
    """Tensors whose sum is x to 8 bits for each part, or x itself."""
    if parts == 0:
        return [x]
    high = x.bfloat16()
    return [high] if parts == 1 else [high, (x - high).bfloat16()]


def multiply(weights: Tensor, terms: Sequence[Tensor]) -> Tensor:
    """W [n, t, s] times the sum of terms, :func:`in_parts` of [n, s, C]."""
    if terms[0].dtype != torch.bfloat16:
        return torch.bmm(weights, terms[0])
    rounded = weights.bfloat16()
    return sum(bmm_to_float32(rounded, term) for term in terms)


def weight_gradient(grads: Sequence[Tensor], terms: Sequence[Tensor]) -> Tensor:
    """From the gradient [n, t, C] of W times terms [n, s, C], that of W [n, t, s]; both in parts.

    The product of two second parts is less than the others are rounded by.
    """
    columns = [term.transpose(1, 2) for term in terms]
    result = multiply(grads[0], columns)
    return result + multiply(grads[1], columns[:1]) if len(grads) > 1 else result


def refuse_second() -> None:
    """RuntimeError in a gradient that is to be differentiated: autograd would take it as fixed."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            'the gradient of products of bfloat16 tokens on CUDA is differentiable once; float32 '
            'tokens have second derivatives'
        )


def bmm_to_float32(a: Tensor, b: Tensor) -> Tensor:
    """The product of bfloat16 matrices, added up and kept in float32; torch has it on CUDA only."""
    return torch.bmm(a, b, out_dtype=torch.float32)


class RoundedProduct(torch.autograd.Function):
    """W times terms in two parts, whose gradient takes the same rounded W; torch has none."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, terms: Tensor) -> Tensor:
        weights = weights.bfloat16()
        ctx.save_for_backward(weights, terms)
        return multiply(weights, in_parts(terms, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second()
        weights, terms = ctx.saved_tensors
        by_weights, grads = None, in_parts(grad, 2)
        if ctx.needs_input_grad[0]:
            by_weights = weight_gradient(grads, in_parts(terms, 2))
        return by_weights, multiply(weights.transpose(1, 2), grads)
