"""Products of weights W with terms, such as ``e^k v`` and ``e^k``, in the precision of the tokens.

- ``'fp32'``: operands are multiplied as they are; torch's switches decide about tf32.
- ``'bf16'``: W and the terms are rounded to bfloat16, without a gradient.
- ``'bf16x2'``: W is rounded, the terms are split into two bfloat16 summands, with a gradient.

In gradients the rounding of W cancels, but not that of the terms (docs/ops.md).
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..tracing import transformed


def matmul_precision(value: Tensor) -> str:
    """Return the precision of products with terms of these tokens."""
    if value.device.type != 'cuda' or value.dtype != torch.bfloat16 or transformed():
        return 'fp32'
    return 'bf16x2' if torch.is_grad_enabled() else 'bf16'


def split_terms(x: Tensor, precision: str) -> list[Tensor]:
    if precision == 'fp32':
        return [x]
    high = x.bfloat16()
    return [high] if precision == 'bf16' else [high, (x - high).bfloat16()]


def multiply(weights: Tensor, terms: Sequence[Tensor]) -> Tensor:
    """Return W [n, t, s] times the sum of the split terms [n, s, C]."""
    if terms[0].dtype != torch.bfloat16:
        return torch.bmm(weights, terms[0])
    rounded = weights.bfloat16()
    result = bmm_to_float32(rounded, terms[0])
    return result if len(terms) == 1 else add_bmm(result, rounded, terms[1])


def grad_weights(grads: Sequence[Tensor], terms: Sequence[Tensor]) -> Tensor:
    """Return the gradient of W from that [n, t, C] of W times the terms [n, s, C]; both split."""
    columns = [term.transpose(1, 2) for term in terms]
    result = multiply(grads[0], columns)
    return add_bmm(result, grads[1], columns[0]) if len(grads) > 1 else result


def refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            'the gradient of products of bfloat16 tokens on CUDA is differentiable once; float32 '
            'tokens have second derivatives'
        )


# torch supports it on CUDA only.
def bmm_to_float32(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b, out_dtype=torch.float32)


def add_bmm(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    # torch 2.11 cannot trace baddbmm, and a compiler fuses the sum.
    if torch.compiler.is_compiling() or total.is_meta:
        return total + bmm_to_float32(a, b)
    return torch.baddbmm(total, a, b, out_dtype=torch.float32)


class RoundedProduct(torch.autograd.Function):
    """W [n, t, s] times terms [n, s, C] in ``'bf16x2'``, with the same rounded W backward.

    Both summands of the terms are one product, as float32 sums would move more bytes.
    """

    apply: ClassVar[Callable[..., tuple[Tensor, ...]]]

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *terms: Tensor) -> tuple[Tensor, ...]:
        weights, split = weights.bfloat16(), _stacked(terms)
        ctx.save_for_backward(weights, split)
        return _product(weights, split, terms)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        weights, terms = ctx.saved_tensors
        split, grad_w = _stacked(grads), None
        if ctx.needs_input_grad[0]:
            # Without the product of the two low summands, which is below rounding.
            high, low = (x.transpose(1, 2) for x in terms.chunk(2, 1))
            first, second = bmm_to_float32(split, high).chunk(2, 1)
            grad_w = add_bmm(first + second, split.chunk(2, 1)[0], low)
        return grad_w, *_product(weights.transpose(1, 2), split, grads)


def _product(weights: Tensor, split: Tensor, terms: Sequence[Tensor]) -> tuple[Tensor, ...]:
    sums = bmm_to_float32(torch.cat([weights, weights], 2), split)
    parts: tuple[Tensor, ...] = sums.split([term.shape[2] for term in terms], 2)
    return parts


def _stacked(terms: Sequence[Tensor]) -> Tensor:
    """Return the terms next to each other, their low summands below the high ones [n, 2·s, C]."""
    pairs = [split_terms(term, 'bf16x2') for term in terms]
    return torch.cat([torch.cat(part, 2) for part in zip(*pairs, strict=True)], 1)
