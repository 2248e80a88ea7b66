"""``Σ e^k v / Σ e^k`` over the tokens up to each, with one shift per column, and its backward pass.

The backward pass is written out: autograd's goes over the tokens twice as often, with new memory
each time.
"""

from typing import Any

import torch
from torch import Tensor

from .scan import blocks_pay, scan_in_place
from .sums import column_shift, mean, running_sum


def running_mean(key: Tensor, value: Tensor) -> Tensor:
    """key, value [B, T, D] give [B, T, D]; hidden keys are −inf, a token that sees none gives 0."""
    if not (blocks_pay(key, 1) and blocks_pay(value, 1)):
        return _composed_mean(key, value)
    if torch.is_grad_enabled():
        return _RunningMean.apply(key, value)
    return _mean_and_denominator(key, value, column_shift(key, 1))[0]


def _composed_mean(key: Tensor, value: Tensor) -> Tensor:
    """:func:`running_mean` of plain operations, whose gradient is autograd's."""
    weight = torch.exp(key - column_shift(key, 1))
    return mean(running_sum(weight * value, 1), running_sum(weight, 1))


def _mean_and_denominator(key: Tensor, value: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The mean, and its denominator over ``e^shift`` with ∞ where nothing was seen."""
    weight = (key - shift).exp_()
    result = scan_in_place(weight * value, 1)
    denominator = scan_in_place(weight, 1)
    tiny = torch.finfo(denominator.dtype).tiny
    if (denominator[:, 0] < tiny).any():  # the sums grow: no later token sees less
        denominator.masked_fill_(denominator < tiny, torch.inf)
    return result.div_(denominator), denominator


class _RunningMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor) -> Tensor:
        shift = column_shift(key, 1)
        result, denominator = _mean_and_denominator(key, value, shift)
        ctx.save_for_backward(key, value, shift, result, denominator)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key, value, shift, result, denominator = ctx.saved_tensors
        if torch.is_grad_enabled():  # of a gradient that is to be differentiated
            inputs = zip((key, value), ctx.needs_input_grad, strict=True)
            needed = [x for x, need in inputs if need]
            composed = _composed_mean(key, value)
            found = iter(torch.autograd.grad(composed, needed, grad, create_graph=True))
            return tuple(next(found) if need else None for need in ctx.needs_input_grad)
        weight = (key - shift).exp_()
        by_term = grad / denominator
        by_weight = scan_in_place(by_term * result, 1, reverse=True)
        by_term = scan_in_place(by_term, 1, reverse=True)
        by_key = (by_term * value).sub_(by_weight).mul_(weight)
        return by_key, by_term.mul_(weight)
