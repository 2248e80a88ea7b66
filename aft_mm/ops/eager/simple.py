"""AFT-simple: W = 1.

query is [B, T, D], key and value [B, S, D], their sums [B, 1, D] or, if causal, [B, T, D]; those of
relu2 have 2·D channels.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..online_softmax import (
    FAST_RANGE,
    apply_gate,
    column_shift,
    composed_gradients,
    from_token,
    hide,
    is_block_scan_applicable,
    key_range,
    mean,
    mean_by_columns,
    needs_torch,
    prefix_sum,
    relu_terms,
    running_sum,
    scan_in_place,
)
from ..path_choice import choose

# Each column is one program; fewer leave most of a GPU idle.
FEWEST_SCANNED_COLUMNS = 1024
SCAN_DEVICES = ('cuda',)


def aft_simple(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    key_function: str,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_simple` in O(T·D): a softmax over tokens, or running sums."""
    dtype = value.dtype
    if key_function != 'softmax':
        key, value = hide(key, value, key_mask, fill=0)
        terms = relu_terms(key, value, key_function)
        mixed = running_sum(terms, 1) if causal else terms.sum(1, keepdim=True)
        if key_function == 'relu2':
            return apply_relu2_gates(query, mixed, dtype)
    else:
        key, value = hide(key, value, key_mask)
        if causal and is_one_scan(key):
            mixed = _ScannedMean.apply(key, value)[0]
        elif causal:
            is_exact = key_range(key, 1) <= FAST_RANGE
            otherwise = partial(mean_by_columns, running_mean, _safe_running_mean)
            mixed = choose(is_exact, running_mean, otherwise, key, value)
        else:
            weight = torch.exp(key - column_shift(key, 1))
            mixed = mean((weight * value).sum(1, True), weight.sum(1, True))
    if query is None and not causal:
        mixed = mixed.repeat(1, key.shape[1], 1)  # the caller may write to the result
    return apply_gate(query, mixed, gate, dtype)


def apply_relu2_gates(query: Tensor | None, mixed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``relu(q) ⊙ a + relu(−q) ⊙ b`` of the sums (a, b) = mixed [..., 2·D]."""
    assert query is not None  # the gate is 'relu'
    query = query.to(mixed.dtype)
    positive, negative = mixed.chunk(2, -1)
    return (torch.relu(query) * positive + torch.relu(-query) * negative).to(dtype)


def is_one_scan(key: Tensor) -> bool:
    """Return whether a compiler makes the running mean one scan, which only a GPU can."""
    return (
        torch.compiler.is_dynamo_compiling()
        and key.device.type in SCAN_DEVICES
        and key.shape[0] * key.shape[2] >= FEWEST_SCANNED_COLUMNS
        and not torch._C._are_functorch_transforms_active()
    )


def _scan_sums(shift: Tensor, *sums: Tensor, reverse: bool = False) -> list[Tensor]:
    """Return running maxima of `shift` and sums along the tokens, divided by ``e^shift``."""
    parts = [part.movedim(1, 0) for part in (shift, *sums)]
    if reverse:
        parts = [part.flip(0) for part in parts]
    parts = torch.ops.higher_order.associative_scan(_add_sums, parts, ())
    if reverse:
        parts = [part.flip(0) for part in parts]
    return [part.movedim(0, 1) for part in parts]


def _add_sums(
    shift_a: Tensor, a0: Tensor, a1: Tensor, shift_b: Tensor, b0: Tensor, b1: Tensor
) -> list[Tensor]:
    shift = torch.maximum(shift_a, shift_b)
    scale_a, scale_b = torch.exp(shift_a - shift), torch.exp(shift_b - shift)
    return [shift, a0 * scale_a + b0 * scale_b, a1 * scale_a + b1 * scale_b]


class _ScannedMean(torch.autograd.Function):
    """:func:`running_mean` as online softmax, exact for any key, with one scan in each direction.

    The gradient of autograd would read hundreds of times as many bytes.
    """

    apply: ClassVar[Callable[..., tuple[Tensor, ...]]]

    @staticmethod
    def forward(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        limits = torch.finfo(key.dtype)
        visible = (key != -torch.inf).to(key.dtype)
        largest, numerator, denominator = _scan_sums(key.clamp_min(limits.min), value, visible)
        empty = denominator == 0
        # Their logarithm in one number would lose digits next to a key of 1e4.
        largest = largest.masked_fill(empty, limits.max)
        denominator = denominator.masked_fill(empty, torch.inf)
        return numerator / denominator, largest, denominator

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.save_for_backward(*inputs, *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Tensor) -> tuple[Tensor, Tensor]:
        key, value, result, largest, denominator = ctx.saved_tensors
        grad = grad / denominator
        shift, grad_term, grad_weight = _scan_sums(-largest, grad, grad * result, reverse=True)
        weight = torch.exp(key + shift)
        return weight * (value * grad_term - grad_weight), weight * grad_term


def _safe_running_mean(key: Tensor, value: Tensor) -> Tensor:
    sums = prefix_sum(from_token(key.double(), value.double()), 1)
    return mean(sums.numerator, sums.denominator).to(key.dtype)


def running_mean(key: Tensor, value: Tensor) -> Tensor:
    """Return ``Σ e^k v / Σ e^k`` [B, T, D] over the tokens up to each; hidden keys are −inf."""
    if not (is_block_scan_applicable(key, 1) and is_block_scan_applicable(value, 1)):
        return _composed_running_mean(key, value)
    if torch.is_grad_enabled():
        return _RunningMean.apply(key, value)
    return _mean_and_denominator(key, value, column_shift(key, 1))[0]


def _composed_running_mean(key: Tensor, value: Tensor) -> Tensor:
    weight = torch.exp(key - column_shift(key, 1))
    return mean(running_sum(weight * value, 1), running_sum(weight, 1))


def _mean_and_denominator(key: Tensor, value: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and its denominator over ``e^shift``, ∞ where nothing is visible."""
    weight = (key - shift).exp_()
    result = scan_in_place(weight * value, 1)
    denominator = scan_in_place(weight, 1)
    tiny = torch.finfo(denominator.dtype).tiny
    if (denominator[:, 0] < tiny).any():  # no later token sees less
        denominator.masked_fill_(denominator < tiny, torch.inf)
    return result.div_(denominator), denominator


class _RunningMean(torch.autograd.Function):
    """:func:`running_mean` with a backward pass that reads the tokens half as often."""

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor) -> Tensor:
        shift = column_shift(key, 1)
        result, denominator = _mean_and_denominator(key, value, shift)
        ctx.save_for_backward(key, value, shift, result, denominator)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key, value, shift, result, denominator = ctx.saved_tensors
        if needs_torch(grad):
            return composed_gradients(
                ctx.needs_input_grad, _composed_running_mean, (key, value), grad
            )
        weight = (key - shift).exp_()
        grad_term = grad / denominator
        grad_weight = scan_in_place(grad_term * result, 1, reverse=True)
        grad_term = scan_in_place(grad_term, 1, reverse=True)
        grad_key = (grad_term * value).sub_(grad_weight).mul_(weight)
        return grad_key, grad_term.mul_(weight)
