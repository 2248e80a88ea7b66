"""Products of weights W with terms, (e^k v, e^k) say, in the precision that the tokens ask for.

float32 operands are multiplied as they are, and torch's switches decide about tf32. Of bfloat16
tokens on CUDA, which are rounded to 8 bits already, tensor cores multiply bfloat16 operands and add
in float32:

- without a gradient W and terms are rounded once;
- with one, W is rounded once and the terms come in two parts of 8 bits each. Gradients are
  differences of products with the same W, so what its rounding did cancels as it should, while
  that of the terms, or of tf32, would stay. The gradient of W is a product of two such terms.

Worst error over the rounding of the result to bfloat16, of the output and of any gradient, at
T = 196 to 3072 of aft_full and aft_local (error against float64 over the largest entry); the last
column has values of 1 ± 0.1, where the gradients of key and w nearly cancel:

=======================  ======  ===========  =================
operands                 output  gradients    of close values
=======================  ======  ===========  =================
bfloat16                 1.9     3.4          20
tf32                     0.2     0.5          4
W once, terms in two     1.0     1.4          0.9
=======================  ======  ===========  =================
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def term_parts(value: Tensor) -> int:
    """The parts that terms of these tokens are multiplied in; 0 leaves the operands as they are."""
    if value.device.type != 'cuda' or value.dtype != torch.bfloat16:
        return 0
    return 2 if torch.is_grad_enabled() else 1


def multiply(weights: Tensor, terms: Tensor, parts: int) -> Tensor:
    """W [n, t, s] times terms [n, s, C], differentiable."""
    if parts == 0:
        return torch.bmm(weights, terms)
    if torch.is_grad_enabled():
        return _Product.apply(weights, terms, parts)
    return _rounded_product(weights, terms, parts)


def weight_gradient(grad: Tensor, terms: Tensor, parts: int) -> Tensor:
    """From the gradient [n, t, C] of W times terms [n, s, C], that of W [n, t, s]."""
    columns = terms.transpose(1, 2)
    if parts == 0:
        return torch.bmm(grad, columns)
    high, low = _split(grad)
    return _rounded_product(high, columns, parts) + _rounded_product(low, columns, 1)


def _rounded_product(weights: Tensor, terms: Tensor, parts: int) -> Tensor:
    weights = weights.bfloat16()
    if parts == 1:
        return bmm_to_float32(weights, terms.bfloat16())
    high, low = _split(terms)
    return bmm_to_float32(weights, high) + bmm_to_float32(weights, low)


def bmm_to_float32(a: Tensor, b: Tensor) -> Tensor:
    """The product of bfloat16 matrices, added up and kept in float32; torch has it on CUDA only."""
    return torch.bmm(a, b, out_dtype=torch.float32)


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two bfloat16 tensors whose sum is x to 16 bits."""
    high = x.bfloat16()
    return high, (x - high).bfloat16()


class _Product(torch.autograd.Function):
    """A product whose gradient takes the same rounded W, which torch's of `out_dtype` lacks."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, terms: Tensor, parts: int) -> Tensor:
        weights = weights.bfloat16()
        ctx.save_for_backward(weights, terms)
        ctx.parts = parts
        return _rounded_product(weights, terms, parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, terms = ctx.saved_tensors
        by_weights = by_terms = None
        if ctx.needs_input_grad[0]:
            by_weights = weight_gradient(grad, terms, ctx.parts)
        if ctx.needs_input_grad[1]:
            by_terms = _rounded_product(weights.transpose(1, 2), grad, ctx.parts)
        return by_weights, by_terms, None
