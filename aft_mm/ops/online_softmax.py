"""Sums of ``e^k v`` and ``e^k`` that neither overflow nor underflow, and what all ops share.

:class:`ShiftedSum` is the state of online softmax. Functions of a Summable take a ShiftedSum on the
safe paths and a plain tensor on the fast ones.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.checks import described, refuse

from .export_paths import recording, replaying
from .gates import Gate, gate_values
from .tracing import clipped, may_read, no_autocast, transformed

# The largest range of exponents for plain float32 sums with one shift: e^±70 leaves room for
# millions of terms before e^±88.
FAST_RANGE = 70.0
# Without causality only biases can starve a row; flushed terms are below e^(60 - 88) of the sum.
FAST_BIAS_RANGE = 60.0
# Below this size a second pass is cheaper than reading a result.
SMALLEST_READ = 2**15
# Longer scans of one element per column fail in Inductor of torch 2.11 on a GPU.
LONGEST_COMPILED_SCAN = 128
# Rows of a block of `scan`, and the sizes from which it beats cumsum.
SCAN_BLOCK = 32
SMALLEST_SCAN, FEWEST_SCAN_COLUMNS = 2**15, 16


class ShiftedSum(NamedTuple):
    """Numerator ``Σ e^k v`` and denominator ``Σ e^k``, over ``e^shift``.

    The empty sum is (:func:`lowest`, 0, 0).
    """

    shift: Tensor
    numerator: Tensor
    denominator: Tensor


Summable = TypeVar('Summable', ShiftedSum, Tensor)


def hide(
    key: Tensor, value: Tensor, key_mask: Tensor | None, fill: float = -torch.inf
) -> tuple[Tensor, Tensor]:
    """Return key and value in the dtype of sums, hidden keys at `fill` and hidden values at 0."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    key, value = key.to(dtype), value.to(dtype)
    if key_mask is None:
        return key, value
    hidden = ~key_mask.unsqueeze(-1)
    return key.masked_fill(hidden, fill), value.masked_fill(hidden, 0)


def apply_gate(
    query: Tensor | None, mixed: Tensor, gate: Gate, dtype: torch.dtype | None = None
) -> Tensor:
    """Return ``g(q) ⊙ mixed``, the last step of every AFT op.

    Args:
        query: [..., D], or None for ``gate='none'``.
        mixed: [..., D], broadcast to `query`; the product has its dtype.
        gate: g, see :mod:`aft_mm.ops`.
        dtype: That of the result, by default of `mixed`.
    """
    if gate != 'none':
        for name, x in (('query', query), ('mixed', mixed)):
            if not isinstance(x, Tensor):
                refuse(name, f'a tensor with gate={described(gate)}', x)
        gating = gate_values(query.to(mixed.dtype), gate)
        # In place without autograd: new memory pages cost more than the product.
        in_place = isinstance(gate, str) and not (torch.is_grad_enabled() or transformed())
        mixed = gating.mul_(mixed) if in_place else gating * mixed
    return mixed if dtype is None else mixed.to(dtype)


def relu_terms(key: Tensor, value: Tensor, key_function: str) -> Tensor:
    """Return ``relu(k) ⊙ v`` [..., D]; for relu2 followed by ``relu(−k) ⊙ v``, [..., 2·D]."""
    if key_function == 'relu2':
        key, value = torch.cat((key, -key), -1), torch.cat((value, value), -1)
    return torch.relu(key) * value


def lowest(dtype: torch.dtype) -> float:
    """Return the shift of an empty sum; −inf would give NaN."""
    return torch.finfo(dtype).min


def key_range(key: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    if recording():
        return key.new_tensor(torch.inf)
    return column_ranges(key, dim).amax()


def column_ranges(key: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the range of the visible keys of each column along `dim`, at least 0.

    Hidden keys are −inf.
    """
    key = key.detach()
    smallest = None
    # The size is asked for last: in a graph it would bound the batch.
    is_graph = torch.compiler.is_compiling() or replaying() or transformed()
    if not is_graph and key.device.type == 'cpu' and key.numel() >= SMALLEST_READ:
        smallest = key.amin(dim)  # without hidden keys a CPU saves a pass
        if not smallest.isfinite().all():
            smallest = None
    if smallest is None:
        visible = key.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)
        smallest = visible.amin(dim)
    return (key.amax(dim) - smallest).clamp_min(0)


def zero_if_finite(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Return 0, or NaN where the sum of x along `dim`, by default of all numbers, is not finite."""
    total = x.detach().sum(dim)
    return total - total


def by_columns(
    is_exact: Tensor, fast: Callable[..., Tensor], safe: Callable[..., Tensor], *operands: Tensor
) -> Tensor:
    """Return ``fast(*operands)`` with the columns of ``safe(*operands)`` where `fast` is not exact.

    Args:
        is_exact: bool [C], whose values are read.
        fast: A path that treats the columns [..., C] alone.
        safe: The same for any values.
        operands: Tensors [..., C].
    """
    others = (~is_exact).nonzero().flatten()
    # None where only the sum of all values overflows.
    if not 0 < 2 * len(others) <= len(is_exact):
        return safe(*operands)
    mixed = fast(*(x.where(is_exact, 0) for x in operands))
    return mixed.index_copy(-1, others, safe(*(x.index_select(-1, others) for x in operands)))


def mean_by_columns(
    fast: Callable[..., Tensor], safe: Callable[..., Tensor], key: Tensor, value: Tensor
) -> Tensor:
    """Return :func:`by_columns` of key and value [B, ..., D], `safe` if ranges may not be read."""
    if not may_read(key):
        return safe(key, value)
    columns = [x.movedim(0, -2).flatten(-2).unsqueeze(0) for x in (key, value)]
    ranges = column_ranges(columns[0].flatten(0, -2), 0)
    mixed = by_columns(ranges <= FAST_RANGE, fast, safe, *columns)
    samples: Tensor = mixed.squeeze(0).unflatten(-1, (len(key), -1))
    return samples.movedim(-2, 0)


def column_shift(key: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the detached maximum along `dim` (kept), finite also if all keys are hidden."""
    return key.detach().amax(dim, keepdim=True).clamp_min(torch.finfo(key.dtype).min)


def from_token(key: Tensor, value: Tensor) -> ShiftedSum:
    largest = key.detach().clamp_min(lowest(key.dtype))
    weight = torch.exp(key - largest)
    return ShiftedSum(largest, weight * value, weight)


def reduce(key: Tensor, value: Tensor, dim: int) -> ShiftedSum:
    largest = column_shift(key, dim)
    weight = torch.exp(key - largest)
    return ShiftedSum(largest, (weight * value).sum(dim, True), weight.sum(dim, True))


def add(a: Summable, b: Summable) -> Summable:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a + b
    largest = torch.maximum(a.shift, b.shift)
    scale_a, scale_b = torch.exp(a.shift - largest), torch.exp(b.shift - largest)
    return ShiftedSum(
        largest,
        a.numerator * scale_a + b.numerator * scale_b,
        a.denominator * scale_a + b.denominator * scale_b,
    )


def append(sums: ShiftedSum, key: Tensor, value: Tensor) -> ShiftedSum:
    """Return ``add(sums, from_token(key, value))`` in fewer operations."""
    largest = torch.maximum(sums.shift, key)
    scale, weight = torch.exp(sums.shift - largest), torch.exp(key - largest)
    return ShiftedSum(
        largest,
        torch.addcmul(value * weight, sums.numerator, scale),
        torch.addcmul(weight, sums.denominator, scale),
    )


def map_parts(x: Summable, function: Callable[[Tensor], Tensor]) -> Summable:
    return function(x) if isinstance(x, Tensor) else ShiftedSum(*map(function, x))


def pad(x: Summable, before: int, after: int, dim: int) -> Summable:
    """Pad `dim` with empty sums; negative amounts crop."""

    def pad_part(part: Tensor, fill: float) -> Tensor:
        amounts = [0, 0] * (part.dim() - 1 - dim % part.dim()) + [before, after]
        return F.pad(part, amounts, value=fill)

    if isinstance(x, Tensor):
        return pad_part(x, 0.0)
    return ShiftedSum(
        pad_part(x.shift, lowest(x.shift.dtype)),
        pad_part(x.numerator, 0.0),
        pad_part(x.denominator, 0.0),
    )


def _length(x: Summable, dim: int) -> int:
    return (x if isinstance(x, Tensor) else x.numerator).shape[dim]


def shift(x: Summable, steps: int, dim: int) -> Summable:
    """Return ``y[t] = x[t − steps]``, the empty sum where ``t − steps`` is outside."""
    steps = clipped(steps, _length(x, dim))
    return pad(x, steps, -steps, dim)


def sliding_sum(x: Summable, before: int, after: int, dim: int) -> Summable:
    """Return ``y[t] = Σ x[t − before … t + after]``; a negative bound excludes tokens near t."""
    length = _length(x, dim)
    if not replaying():  # a graph may leave the length open
        before, after = min(before, length - 1), min(after, length - 1)
    size = before + after + 1
    if size < 1:
        return shift(x, length, dim)
    # Windows may end beyond the sequence.
    x = pad(x, 0, max(after, 0), dim)
    result: Summable | None = None
    done, power, power_size = 0, x, 1
    while True:
        if size & power_size:
            result = power if result is None else add(result, shift(power, done, dim))
            done += power_size
        if done == size and result is not None:
            break
        power = add(power, shift(power, power_size, dim))
        power_size *= 2
    return pad(result, -after, 0, dim) if after >= 0 else shift(result, -after, dim)


def prefix_sum(x: Summable, dim: int) -> Summable:
    if isinstance(x, Tensor):
        return running_sum(x, dim)
    step = 1
    while step < _length(x, dim):
        x = add(x, shift(x, step, dim))
        step *= 2
    return x


def suffix_sum(x: Summable, dim: int) -> Summable:
    flipped = prefix_sum(map_parts(x, lambda part: part.flip(dim)), dim)
    return map_parts(flipped, lambda part: part.flip(dim))


def total(x: Summable, dim: int) -> Summable:
    if isinstance(x, Tensor):
        return x.sum(dim, True)
    largest = x.shift.amax(dim, keepdim=True)
    scale = torch.exp(x.shift - largest)
    parts = (part * scale for part in (x.numerator, x.denominator))
    return ShiftedSum(largest, *(part.sum(dim, True) for part in parts))


def mean(numerator: Tensor, denominator: Tensor, in_place: bool = False) -> Tensor:
    """Return numerator / denominator, 0 where nothing was visible.

    A division by ∞ passes no gradient there; that of a reciprocal would overflow. With `in_place`
    the numerator is overwritten if gradients are off.
    """
    tiny = torch.finfo(denominator.dtype).tiny
    if torch.is_grad_enabled():
        return _divide(numerator, denominator.masked_fill(denominator < tiny, torch.inf))
    denominator = denominator.clamp_min(tiny)
    return numerator.div_(denominator) if in_place else numerator / denominator


def _divide(a: Tensor, b: Tensor) -> Tensor:
    graph = torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed()
    return _Quotient.apply(a, b) if torch.is_grad_enabled() and not graph else a / b


class _Quotient(torch.autograd.Function):
    """``a / b``, whose second derivatives do not divide by b² or b³, which may underflow."""

    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        quotient = a / b
        ctx.save_for_backward(b, quotient)
        return quotient

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        b, quotient = ctx.saved_tensors  # a has the shape of the quotient
        grad = _divide(grad, b)
        return grad, -(grad * quotient).sum_to_size(b.shape) if ctx.needs_input_grad[1] else None


def needs_torch(grad: Tensor) -> bool:
    """Return whether a gradient is differentiated itself, or a batch of gradients."""
    return torch.is_grad_enabled() or transformed() or not torch._C._has_storage(grad)


def composed_gradients(
    wanted: Sequence[bool],
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    grad: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the wanted gradients of ``function(*inputs)`` by autograd, None for others."""
    create_graph = torch.is_grad_enabled()
    needed = [x for x, need in zip(inputs, wanted, strict=False) if need and x is not None]
    with torch.enable_grad(), no_autocast(grad):
        result = function(*inputs)
        grads = iter(torch.autograd.grad(result, needed, grad, create_graph=create_graph))
    return tuple(next(grads) if need else None for need in wanted)


def running_sum(x: Tensor, dim: int) -> Tensor:
    """Return ``x.cumsum(dim)``, which a compiler can fuse on any device."""
    length, longest = x.shape[dim], LONGEST_COMPILED_SCAN
    if not torch.compiler.is_compiling() or replaying() or length <= longest:
        return scan(x, dim)
    blocks: Tensor = pad(x, 0, -length % longest, dim).unflatten(dim, (-1, longest))
    inside = blocks.cumsum(dim + 1)
    before = shift(inside.select(dim + 1, -1).cumsum(dim), 1, dim)
    return (inside + before.unsqueeze(dim + 1)).flatten(dim, dim + 1).narrow(dim, 0, length)


def is_block_scan_applicable(x: Tensor, dim: int) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or transformed():
        return False
    if x.device.type != 'cpu' or x.numel() < SMALLEST_SCAN or not torch._C._has_storage(x):
        return False
    rows, columns = x.shape[dim], x.shape[dim:].numel() // x.shape[dim]
    return rows >= 2 * SCAN_BLOCK and columns >= FEWEST_SCAN_COLUMNS


def scan(x: Tensor, dim: int, reverse: bool = False) -> Tensor:
    """Return ``x.cumsum(dim)``, with `reverse` the sums from the end.

    Nothing is subtracted, so a NaN or a large term reaches no other rows.
    """
    if not is_block_scan_applicable(x, dim):
        return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Scan.apply(x, dim, reverse)
    return scan_in_place(x.clone(memory_format=torch.contiguous_format), dim, reverse)


class _Scan(torch.autograd.Function):
    apply: ClassVar[Callable[..., Tensor]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, reverse: bool) -> Tensor:
        ctx.options = (dim, reverse)
        return scan(x, dim, reverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        dim, reverse = ctx.options
        return scan(grad, dim, not reverse), None, None


def scan_in_place(x: Tensor, dim: int, reverse: bool = False) -> Tensor:
    """Compute :func:`scan` over x itself, a temporary that autograd does not see."""
    dim %= x.dim()
    length, rest = x.shape[dim], x.shape[dim] % SCAN_BLOCK
    blocks = x.narrow(dim, rest if reverse else 0, length - rest).unflatten(dim, (-1, SCAN_BLOCK))
    totals = scan(blocks.sum(dim + 1), dim, reverse)
    rows, others = blocks.unbind(dim + 1), totals.shape[dim] - 1
    if reverse:
        rows = rows[::-1]
    rows[0].narrow(dim, 0 if reverse else 1, others).add_(
        totals.narrow(dim, 1 if reverse else 0, others)
    )
    for row, previous in zip(rows[1:], rows[:-1], strict=True):
        row.add_(previous)
    if rest:
        tail = x.narrow(dim, 0 if reverse else length - rest, rest)
        tail.copy_(scan(tail, dim, reverse)).add_(totals.narrow(dim, 0 if reverse else others, 1))
    return x
