"""AFT-full with a w per sample or head, and a mask of pairs.

Tokens are [N, M, S, C], w is [N, M, T, S], of N samples and M heads. If all samples share the w of
a head, N counts heads, M is 1, and the samples are columns.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..export_paths import recording, replaying
from ..online_softmax import (
    FAST_BIAS_RANGE,
    apply_gate,
    column_shift,
    composed_gradients,
    key_range,
    mean,
    needs_torch,
    zero_if_finite,
)
from ..path_choice import choose
from ..tracing import may_read, no_autocast, transformed
from .custom_ops import as_graph_node

# Numbers in a chunk.
CHUNK = 2**19
EXACT_CHUNK = 2**20
# The largest range of exponents in float64, as FAST_BIAS_RANGE is for float32.
WIDE_RANGE = 600.0
# With keys within ±PLAIN_KEY and a largest w per row within ±PLAIN_BIAS sums need no shift: they
# are at least e^-47, and flushed terms are below their rounding. PLAIN_VALUE keeps products with
# hidden values finite.
PLAIN_KEY, PLAIN_BIAS, PLAIN_VALUE = 12.0, 35.0, 1e25


def aft_full_batched(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    num_heads: int | None,
    pair_mask: Tensor | None,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_full` in O(T·S·D) for a bias per sample or head."""
    dtype, (batch, sources, channels) = value.dtype, value.shape
    sum_dtype = torch.promote_types(dtype, torch.float32)
    key, value, bias = (x.to(sum_dtype) for x in (key, value, position_bias))
    heads, targets = num_heads or 1, bias.shape[-2]
    if num_heads is None:
        bias = bias.unsqueeze(-3)
    shared = bias.dim() == 3 and pair_mask is None and key_mask is None
    if shared:
        key, value = (
            x.unflatten(2, (heads, -1)).permute(2, 1, 0, 3).reshape(heads, 1, sources, -1)
            for x in (key, value)
        )
        bias = bias.unsqueeze(1)
    else:
        key, value = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x in (key, value))
        bias = bias if bias.dim() == 4 else bias.unsqueeze(0)
    visible = None if key_mask is None else key_mask[:, None, None]
    if pair_mask is not None:
        assert visible is not None  # key_mask hides what no pair sees
        visible = visible & pair_mask.unsqueeze(1)
    if causal:
        past = torch.ones(1, 1, targets, sources, dtype=torch.bool, device=key.device).tril()
        visible = past if visible is None else visible & past
    if visible is not None:
        bias = bias.masked_fill(~visible, -torch.inf)
    differ = causal or pair_mask is not None
    if recording():  # a bias per sample is an input of the graph
        differ = differ or position_bias.dim() == (3 if num_heads is None else 4)
    mixed = _weighted_mean(key, value, bias, key_mask, differ)
    if shared:
        mixed = mixed.view(heads, targets, batch, -1).permute(2, 1, 0, 3)
    else:
        mixed = mixed.transpose(1, 2)
    return apply_gate(query, mixed.reshape(batch, targets, channels), gate, dtype)


def _weighted_mean(
    key: Tensor, value: Tensor, bias: Tensor, key_mask: Tensor | None, differ: bool
) -> Tensor:
    """Return ``Σ W e^k v / Σ W e^k`` [N, M, T, C]; differ: whether rows may see different keys."""
    in_graph = not all(map(may_read, (key, value, bias)))
    masked = differ or key_mask is not None
    if not in_graph and _is_plain_exact(key, value, bias, masked):
        return _mean(key, value, bias, shifted=False, seeing=not masked)
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        key, value = key.masked_fill(hidden, -torch.inf), value.masked_fill(hidden, 0)

    def is_exact(key: Tensor, value: Tensor, bias: Tensor, largest: float) -> Tensor:
        keys = key_range(key, -2)
        if key_mask is not None:
            key = key.masked_fill(~key_mask[:, None, :, None], 0)
        absent = key.detach().amin() == -torch.inf
        if not may_read(absent) or absent:
            # a row may have its largest w at a key of −∞, which the range of keys ignores
            keys = keys + torch.where(absent, key_range(bias, -1), 0)
        if differ:
            # 0 times a NaN that a row does not see is NaN
            return keys + zero_if_finite(value) <= largest
        bias = bias.detach()
        smallest = bias
        if key_mask is not None:
            smallest = bias.masked_fill(~key_mask[:, None, None], torch.inf)
        biases = bias.amax(-1) - smallest.amin(-1)
        return (keys <= largest) | (biases.amax() <= largest)

    def safe(key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        wide = key.double(), value.double(), bias.double()
        if in_graph:
            return exact_mean(*wide).to(key.dtype)
        return choose(is_exact(*wide, WIDE_RANGE), _mean, exact_mean, *wide).to(key.dtype)

    # Keys of a small range allow any w. If all rows see the largest key, a w of a small range
    # allows any keys.
    return choose(is_exact(key, value, bias, FAST_BIAS_RANGE), _mean, safe, key, value, bias)


def _is_plain_exact(key: Tensor, value: Tensor, bias: Tensor, masked: bool) -> bool:
    if key.shape[-2] == 1:  # gradients are 0, to the last digit only with a shift
        return False
    bounds = [*torch.aminmax(key.detach()), *torch.aminmax(bias.detach())]
    if masked:
        bounds += torch.aminmax(value.detach())
    # One transfer from the device.
    on_cpu = key.device.type == 'cpu'
    low, high, *biases = (x.item() for x in bounds) if on_cpu else torch.stack(bounds).tolist()
    if not (low >= -PLAIN_KEY and high <= PLAIN_KEY and biases[1] <= PLAIN_BIAS):
        return False
    if masked and not (biases[2] >= -PLAIN_VALUE and biases[3] <= PLAIN_VALUE):
        return False
    if biases[0] >= -PLAIN_BIAS:
        return True
    largest = bias.detach().amax(-1)
    if masked:
        largest = largest.masked_fill(largest == -torch.inf, 0)
    return bool(largest.amin() >= -PLAIN_BIAS)


def _mean(
    key: Tensor, value: Tensor, bias: Tensor, shifted: bool = True, seeing: bool = False
) -> Tensor:
    """Return the mean by products; seeing: whether every row is known to see a key."""
    # Compilers and exported graphs need plain operations and open sizes.
    if torch.compiler.is_compiling() or transformed():
        return _composed_mean(key, value, bias)
    if torch.is_grad_enabled():
        return _Mean.apply(key, value, bias, shifted, seeing)
    columns = value.shape[-1]
    result = value.new_empty(*value.shape[:2], bias.shape[-2], columns)
    buffers = _Buffers(value, bias)
    for rows in buffers.chunks:
        weights = buffers.weights(bias[rows], shifted)
        terms = buffers.terms(key[rows], value[rows], shifted)
        sums = _product(weights, terms, buffers.sums(len(terms)))
        denominator = sums[..., columns:]
        divisor = denominator if seeing else _without_zeros(denominator)
        torch.div(sums[..., :columns], divisor, out=result[rows])
    return result


def _composed_mean(key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    weights = torch.exp(bias - column_shift(bias, -1))
    exp_key = torch.exp(key - column_shift(key, -2))
    sums = weights @ torch.cat([exp_key * value, exp_key], -1)
    columns = value.shape[-1]  # chunk needs a number, which an exported graph lacks
    return mean(sums[..., :columns], sums[..., columns:])


class _Buffers:
    def __init__(self, value: Tensor, bias: Tensor) -> None:
        count, heads, sources, columns = value.shape
        targets = bias.shape[-2]
        each = heads * (targets * sources + 2 * columns * (targets + sources))
        size = min(count, max(1, CHUNK // each))
        self.chunks = [slice(first, first + size) for first in range(0, count, size)]
        self._weights = value.new_empty(size, heads, targets, sources)
        self._terms = value.new_empty(size, heads, sources, 2 * columns)
        self._sums = value.new_empty(size, heads, targets, 2 * columns)

    def weights(self, bias: Tensor, shifted: bool) -> Tensor:
        """Return W [n, M, T, S], if shifted divided by the largest of each row."""
        weights = self._weights[: len(bias)]
        if shifted:
            return torch.sub(bias, column_shift(bias, -1), out=weights).exp_()
        return torch.exp(bias, out=weights)

    def terms(self, key: Tensor, value: Tensor, shifted: bool) -> Tensor:
        """Return ``e^k v`` and ``e^k`` side by side, [n, M, S, 2·C]."""
        terms, columns = self._terms[: len(key)], key.shape[-1]
        exp_key = terms[..., columns:]
        if shifted:
            torch.sub(key, column_shift(key, -2), out=exp_key).exp_()
        else:  # faster than into a part of each row
            exp_key.copy_(torch.exp(key))
        torch.mul(exp_key, value, out=terms[..., :columns])
        return terms

    def sums(self, count: int) -> Tensor:
        return self._sums[:count]


def _product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    torch.bmm(left.flatten(0, 1), right.flatten(0, 1), out=out.flatten(0, 1))
    return out


def _without_zeros(denominator: Tensor) -> Tensor:
    tiny = torch.finfo(denominator.dtype).tiny
    return torch.threshold(denominator, tiny, torch.inf, out=denominator)


class _Mean(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, bias: Tensor, shifted: bool, seeing: bool
    ) -> Tensor:
        columns = value.shape[-1]
        sums = value.new_empty(*value.shape[:2], bias.shape[-2], 2 * columns)
        buffers = _Buffers(value, bias)
        for rows in buffers.chunks:
            weights = buffers.weights(bias[rows], shifted)
            part = _product(weights, buffers.terms(key[rows], value[rows], shifted), sums[rows])
            denominator = part[..., columns:]
            part[..., :columns].div_(denominator if seeing else _without_zeros(denominator))
        result = sums[..., :columns]
        ctx.save_for_backward(key, value, bias, result, sums[..., columns:])
        ctx.shifted = shifted
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        key, value, bias, result, denominator = ctx.saved_tensors
        if needs_torch(grad):
            return composed_gradients(
                ctx.needs_input_grad, _composed_mean, (key, value, bias), grad
            )
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        grad_bias = bias.new_empty(bias.shape) if ctx.needs_input_grad[2] else None
        columns = value.shape[-1]
        with no_autocast(grad):
            buffers = _Buffers(value, bias)
            for rows in buffers.chunks:
                weights = buffers.weights(bias[rows], ctx.shifted)
                k, v, d = key[rows], value[rows], denominator[rows]
                terms = buffers.terms(k, v, ctx.shifted)
                # The second has the other sign.
                grads = buffers.sums(len(d))
                grad_numerator, grad_denominator = grads[..., :columns], grads[..., columns:]
                torch.div(grad[rows], d, out=grad_numerator)
                torch.mul(grad_numerator, result[rows], out=grad_denominator)
                exp_key = terms[..., columns:]
                if grad_bias is not None:
                    # Two products, which cancel term by term.
                    slopes = _product(grad_numerator, terms[..., :columns].mT, grad_bias[rows])
                    slopes.flatten(0, 1).baddbmm_(
                        grad_denominator.flatten(0, 1), exp_key.mT.flatten(0, 1), alpha=-1
                    )
                    slopes.mul_(weights)
                product = _product(weights.mT, grads, torch.empty_like(terms))
                grad_term, grad_weight = product[..., :columns], product[..., columns:]
                torch.mul(grad_term, exp_key, out=grad_value[rows])
                # Rounded as the other product is: the difference of equal ones is 0.
                grad_term.mul_(v).sub_(grad_weight)
                torch.mul(grad_term, exp_key, out=grad_key[rows])
        return grad_key, grad_value, grad_bias, None, None


def exact_mean(key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    """Return the mean term by term, each row with its own shift."""
    if torch.compiler.is_compiling() and not replaying():
        return _exact_mean_node(key, value, bias)
    if transformed() or replaying():
        return _composed_exact_mean(key, value, bias)
    if torch.is_grad_enabled():
        return _ExactMean.apply(key, value, bias)
    return _exact_forward(key, value, bias)


def _softmax_of_pairs(key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``W e^k`` over its sum, and the values, [..., T, S, C], both 0 for hidden pairs."""
    hidden = bias.unsqueeze(-1) == -torch.inf
    key = key.unsqueeze(-3).masked_fill(hidden, -torch.inf)
    exponent = key - column_shift(key, -2) + bias.unsqueeze(-1)
    weights = torch.exp(exponent - column_shift(exponent, -2))
    total = weights.sum(-2, keepdim=True)
    return weights / total.masked_fill(total == 0, 1), value.unsqueeze(-3).masked_fill(hidden, 0)


def _composed_exact_mean(key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    weights, values = _softmax_of_pairs(key, value, bias)
    return (weights * values).sum(-2)


def _exact_parts(key: Tensor, bias: Tensor) -> Iterator[tuple[slice, tuple[slice, ...]]]:
    count = max(1, EXACT_CHUNK // key[0].numel())
    for first in range(0, len(key)):
        sample = slice(first, first + 1)
        for top in range(0, bias.shape[-2], count):
            yield sample, (sample, slice(None), slice(top, top + count))


def _exact_forward(key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    result = value.new_empty(*value.shape[:2], bias.shape[-2], value.shape[-1])
    for sample, part in _exact_parts(key, bias):
        weights, values = _softmax_of_pairs(key[sample], value[sample], bias[part])
        result[part] = weights.mul_(values).sum(-2)
    return result


def _exact_backward(
    grad: Tensor, key: Tensor, value: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_key, grad_value, grad_bias = (torch.zeros_like(x) for x in (key, value, bias))
    for sample, part in _exact_parts(key, bias):
        weights, values = _softmax_of_pairs(key[sample], value[sample], bias[part])
        weighted = weights * grad[part].unsqueeze(-2)
        grad_value[sample] += weighted.sum(-3)
        result = (weights * values).sum(-2, keepdim=True)
        slopes = weighted.mul_(values - result)
        grad_key[sample] += slopes.sum(-3)
        grad_bias[part] += slopes.sum(-1)
    return grad_key, grad_value, grad_bias


class _ExactMean(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(key, value, bias)
        return _exact_forward(key, value, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if needs_torch(grad):
            return composed_gradients(
                ctx.needs_input_grad, _composed_exact_mean, ctx.saved_tensors, grad
            )
        return _exact_backward(grad, *ctx.saved_tensors)


# torch.compile must not trace the loops.
_exact_mean_node = as_graph_node(
    'aft_mm::exact_pair_mean',
    _exact_forward,
    options='',
    like=lambda key, value, bias: bias @ value,
    gradients=_exact_backward,
)
