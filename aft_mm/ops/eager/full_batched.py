"""AFT-full with a w per sample or per head, and a mask of pairs.

Tokens are [N, M, S, C], w is [N, M, T, S], and N·M products share nothing: N samples and M heads.
If all samples share the w of a head, N counts heads, M is 1, and the samples are columns. Chunks
along N bound the memory of temporaries and keep them in the cache.

As in `banded_matmul.py`, the backward pass is written out and recomputes W and the terms.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import path_choice
from ..path_choice import choose, transformed
from .online_softmax import (
    FAST_BIAS_RANGE,
    apply_gate,
    column_shift,
    hide,
    key_range,
    mean,
    zero_if_finite,
)

# Numbers that a chunk of the products works on at once.
CHUNK = 2**19
# The same for terms one by one, [T, S, C] each.
EXACT_CHUNK = 2**20
# The largest range of exponents in float64, as FAST_BIAS_RANGE is for float32.
WIDE_RANGE = 600.0


def aft_full_batched(
    query, key, value, position_bias, *, num_heads, pair_mask, causal, key_mask, gate
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_full` in O(T·S·D) for a bias per sample or head."""
    dtype, (batch, sources, channels) = value.dtype, value.shape
    key, value = hide(key, value, key_mask)
    heads, targets = num_heads or 1, position_bias.shape[-2]
    bias = position_bias.to(key.dtype)
    if num_heads is None:
        bias = bias.unsqueeze(-3)
    # Samples that see different pairs need weights of their own.
    shared = bias.dim() == 3 and pair_mask is None and key_mask is None
    if shared:
        key, value = (
            x.view(batch, sources, heads, -1).permute(2, 1, 0, 3).reshape(heads, 1, sources, -1)
            for x in (key, value)
        )
        bias = bias.unsqueeze(1)
    else:
        key, value = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (key, value))
        bias = bias if bias.dim() == 4 else bias.unsqueeze(0)
    visible = None if key_mask is None else key_mask[:, None, None]
    if pair_mask is not None:
        visible = pair_mask.unsqueeze(1) if visible is None else visible & pair_mask.unsqueeze(1)
    if causal:
        past = torch.ones(1, 1, targets, sources, dtype=torch.bool, device=key.device).tril()
        visible = past if visible is None else visible & past
    mixed = _weighted_mean(key, value, bias, visible)
    if shared:
        mixed = mixed.view(heads, targets, batch, -1).permute(2, 1, 0, 3)
    else:
        mixed = mixed.transpose(1, 2)
    return apply_gate(query, mixed.reshape(batch, targets, channels), gate, dtype)


def _weighted_mean(key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None) -> Tensor:
    """Return ``Σ W e^k v / Σ W e^k`` [N, M, T, C] for any finite keys and biases.

    Args:
        key: [N, M, S, C], −inf where hidden.
        value: [N, M, S, C].
        bias: w [N or 1, M, T, S]; −inf is a hidden pair.
        visible: bool [N or 1, 1, T, S], [N, 1, 1, S] if all rows see the same keys, or None if they
            see all.
    """

    is_exact = _is_one_shift_exact(key, value, bias, visible, FAST_BIAS_RANGE)
    in_graph = torch.compiler.is_compiling() or path_choice.recording_or_replaying()
    if in_graph:  # whose compiler fuses the mask
        bias, visible = _masked(bias, visible), None

    def fast(key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return _one_shift_mean(key, value, bias, visible)

    def exact(key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return _exact_mean(key, value, bias, visible)

    def safe(key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        wide = key.double(), value.double(), bias.double()
        if in_graph:  # a branch of torch.cond holds no other choice
            return exact(*wide).to(key.dtype)
        is_wide_enough = _is_one_shift_exact(*wide, visible, WIDE_RANGE)
        return choose(is_wide_enough, fast, exact, *wide).to(key.dtype)

    return choose(is_exact, fast, safe, key, value, bias)


def _is_one_shift_exact(
    key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None, largest: float
) -> Tensor | bool:
    """Return whether a shift per column of keys and one per row of w starve no sum.

    The key with the largest w of a row has at least ``e^−range`` of the largest key, so keys of
    small range allow any w. Rows that all see the largest key allow any keys if w has a small range.
    """
    keys = key_range(key, -2)
    if visible is not None and (visible.shape[-2] > 1 or bias.shape[-2] == 1):
        # A product multiplies a NaN that a row does not see by 0, which is NaN.
        return keys + zero_if_finite(value) <= largest
    readable = not (torch.compiler.is_compiling() or key.is_meta or transformed(key, bias))
    if readable and not path_choice.recording_or_replaying() and bool(keys <= largest):
        return True  # without reading w
    bias = bias.detach()
    smallest = bias if visible is None else bias.masked_fill(~visible, torch.inf)
    biases = _masked(bias, visible).amax(-1) - smallest.amin(-1)
    return (keys <= largest) | (biases.amax() <= largest)


def _masked(bias: Tensor, visible: Tensor | None) -> Tensor:
    return bias if visible is None else bias.masked_fill(~visible, -torch.inf)


def _one_shift_mean(key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None) -> Tensor:
    """Return the mean by matrix products, with a shift per column of keys and per row of w."""
    # Compilers and exported graphs need plain operations and open sizes.
    if torch.compiler.is_compiling() or transformed(key, value, bias):
        return _composed_mean(key, value, bias, visible)
    if torch.is_grad_enabled():
        return _OneShiftMean.apply(key, value, bias, visible)
    return _mean_and_denominator(key, value, bias, visible)[0]


def _composed_mean(key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None) -> Tensor:
    """Compute :func:`_one_shift_mean` by plain operations."""
    bias = _masked(bias, visible)
    weights = torch.exp(bias - column_shift(bias, -1))
    exp_key = torch.exp(key - column_shift(key, -2))
    sums = weights @ torch.cat([exp_key * value, exp_key], -1)
    return mean(sums[..., : value.shape[-1]], sums[..., value.shape[-1] :])


def _chunks(key: Tensor, bias: Tensor) -> Iterator[slice]:
    """Yield the ranges of N that are worked on at once."""
    targets, sources = bias.shape[-2:]
    width = 2 * key.shape[-1]
    each = key.shape[1] * (targets * sources + width * (targets + sources))
    count = max(1, CHUNK // each)
    return (slice(first, first + count) for first in range(0, len(key), count))


def _part(x: Tensor | None, rows: slice) -> Tensor | None:
    """Return the rows of x [N or 1, ...]."""
    return x if x is None or len(x) == 1 else x[rows]


def _weights(bias: Tensor, visible: Tensor | None) -> Tensor:
    """Return W [n, M, T, S] of a chunk, divided by the largest of each row."""
    bias = _masked(bias, visible)
    return torch.sub(bias, column_shift(bias, -1)).exp_()


def _terms(key: Tensor, value: Tensor) -> Tensor:
    """Return ``e^k v`` and ``e^k`` side by side, [n, M, S, 2·C], for one product."""
    columns = key.shape[-1]
    terms = key.new_empty(*key.shape[:-1], 2 * columns)
    exp_key = torch.sub(key, column_shift(key, -2), out=terms[..., columns:]).exp_()
    torch.mul(exp_key, value, out=terms[..., :columns])
    return terms


def _mean_and_denominator(
    key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None, save: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the mean, and with `save` the denominator, ∞ where nothing is visible."""
    shape = *value.shape[:2], bias.shape[-2], value.shape[-1]
    result = value.new_empty(shape)
    saved = torch.empty_like(result) if save else None
    tiny = torch.finfo(value.dtype).tiny
    for rows in _chunks(key, bias):
        weights = _weights(bias if len(bias) == 1 else bias[rows], _part(visible, rows))
        sums = weights @ _terms(key[rows], value[rows])
        numerator, denominator = sums.chunk(2, -1)
        divisor = denominator if saved is None else saved[rows]
        torch.threshold(denominator, tiny, torch.inf, out=divisor)
        torch.div(numerator, divisor, out=result[rows])
    return result, saved


class _OneShiftMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None
    ) -> Tensor:
        result, denominator = _mean_and_denominator(key, value, bias, visible, save=True)
        ctx.save_for_backward(key, value, bias, visible, result, denominator)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key, value, bias, visible, result, denominator = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _second_derivative(ctx, _composed_mean, (key, value, bias), visible, grad)
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        grad_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        with torch.autocast(grad.device.type, enabled=False):
            for rows in _chunks(key, bias):
                weights = _weights(bias if len(bias) == 1 else bias[rows], _part(visible, rows))
                terms, d = _terms(key[rows], value[rows]), denominator[rows]
                grads = grad.new_empty(*d.shape[:-1], terms.shape[-1])
                grad_numerator, grad_denominator = grads.chunk(2, -1)
                torch.div(grad[rows], d, out=grad_numerator)
                torch.mul(grad_numerator, result[rows], out=grad_denominator).neg_()
                if grad_bias is not None:
                    # Two products: where the two cancel, they do so term by term.
                    pairs = zip(grads.chunk(2, -1), terms.chunk(2, -1), strict=True)
                    products = [g @ x.mT for g, x in pairs]
                    slopes = products[0].add_(products[1]).mul_(weights)
                    if len(bias) == 1:
                        grad_bias += slopes.sum(0)
                    else:
                        grad_bias[rows] = slopes
                exp_key = terms.chunk(2, -1)[1]
                grad_term, grad_weight = (weights.mT @ grads).chunk(2, -1)
                torch.mul(grad_term, exp_key, out=grad_value[rows])
                # Rounded as the other product is: the difference of equal ones is 0.
                grad_weight.add_(grad_term.mul_(value[rows]))
                torch.mul(grad_weight, exp_key, out=grad_key[rows])
        return grad_key, grad_value, grad_bias, None


def _second_derivative(ctx: Any, function, inputs, visible, grad) -> tuple[Tensor | None, ...]:
    """Return the differentiable gradients of ``function(*inputs, visible)``."""
    needed = [x for x, need in zip(inputs, ctx.needs_input_grad, strict=False) if need]
    result = function(*inputs, visible)
    grads = iter(torch.autograd.grad(result, needed, grad, create_graph=True))
    return *(next(grads) if need else None for need in ctx.needs_input_grad[:3]), None


def _exact_mean(key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None) -> Tensor:
    """Return the mean term by term, where every row has the shift of what it sees."""
    if torch.compiler.is_compiling() and not path_choice.replaying():
        return _exact_mean_node(key, value, bias)
    if transformed(key, value, bias) or path_choice.replaying():
        return _composed_exact_mean(key, value, bias, visible)
    if torch.is_grad_enabled():
        return _ExactMean.apply(key, value, bias, visible)
    return _exact_forward(key, value, bias, visible)


def _softmax_of_pairs(key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``W e^k`` over its sum, and the values, [..., T, S, C], both 0 for hidden pairs.

    The largest key that a row sees is subtracted first: next to a key of 1e16 float64 loses w.
    """
    hidden = bias.unsqueeze(-1) == -torch.inf
    key = key.unsqueeze(-3).masked_fill(hidden, -torch.inf)
    exponent = key - column_shift(key, -2) + bias.unsqueeze(-1)
    weights = torch.exp(exponent - column_shift(exponent, -2))
    total = weights.sum(-2, keepdim=True)
    # A hidden value may be NaN, and 0 · NaN is NaN.
    return weights / total.masked_fill(total == 0, 1), value.unsqueeze(-3).masked_fill(hidden, 0)


def _composed_exact_mean(
    key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None
) -> Tensor:
    weights, values = _softmax_of_pairs(key, value, _masked(bias, visible))
    return (weights * values).sum(-2)


def _exact_parts(key: Tensor, bias: Tensor, visible: Tensor | None) -> Iterator[tuple]:
    """Yield samples, rows, and the masked w of both [n, M, t, S]."""
    targets = bias.shape[-2]
    count = max(1, EXACT_CHUNK // key[0].numel())
    for first in range(0, len(key)):
        sample = slice(first, first + 1)
        for top in range(0, targets, count):
            rows = slice(top, top + count)
            part = bias if len(bias) == 1 else bias[sample]
            seen = _part(visible, sample)
            part = _masked(part[:, :, rows], None if seen is None else seen[:, :, rows])
            yield sample, rows, part


def _exact_forward(
    key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None = None
) -> Tensor:
    result = value.new_empty(*value.shape[:2], bias.shape[-2], value.shape[-1])
    for sample, rows, part in _exact_parts(key, bias, visible):
        weights, values = _softmax_of_pairs(key[sample], value[sample], part)
        result[sample, :, rows] = weights.mul_(values).sum(-2)
    return result


def _exact_backward(
    grad: Tensor, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    grad_key, grad_value, grad_bias = (torch.zeros_like(x) for x in (key, value, bias))
    for sample, rows, part in _exact_parts(key, bias, visible):
        weights, values = _softmax_of_pairs(key[sample], value[sample], part)
        weighted = weights * grad[sample, :, rows].unsqueeze(-2)
        grad_value[sample] += weighted.sum(-3)
        result = (weights * values).sum(-2, keepdim=True)
        slopes = weighted.mul_(values - result)
        grad_key[sample] += slopes.sum(-3)
        grad_bias[slice(None) if len(bias) == 1 else sample, :, rows] += slopes.sum(-1)
    return grad_key, grad_value, grad_bias


class _ExactMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, bias: Tensor, visible: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(key, value, bias, visible)
        return _exact_forward(key, value, bias, visible)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, visible = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _second_derivative(ctx, _composed_exact_mean, inputs, visible, grad)
        return *_exact_backward(grad, *inputs, visible), None


# torch.compile must not trace the loops: a node of a graph, whose gradient is a second one.
_exact_mean_node = torch.library.custom_op(
    'aft_mm::exact_pair_mean',
    _exact_forward,
    mutates_args=(),
    schema='(Tensor key, Tensor value, Tensor bias) -> Tensor',
)
_exact_backward_node = torch.library.custom_op(
    'aft_mm::exact_pair_mean_backward',
    _exact_backward,
    mutates_args=(),
    schema='(Tensor grad, Tensor key, Tensor value, Tensor bias) -> (Tensor, Tensor, Tensor)',
)


@_exact_mean_node.register_fake
def _(key, value, bias):
    return value.new_empty(*value.shape[:2], bias.shape[-2], value.shape[-1])


@_exact_backward_node.register_fake
def _(grad, key, value, bias):
    return torch.empty_like(key), torch.empty_like(value), torch.empty_like(bias)


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, grad: Tensor):
    return _exact_backward_node(grad, *ctx.saved_tensors)


_exact_mean_node.register_autograd(_differentiate, setup_context=_save_inputs)
