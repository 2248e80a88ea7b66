"""Weighted sums that never overflow or underflow, and the choice between them and plain sums.

A :class:`Sums` stands for numerator ``Σ e^k v`` and denominator ``Σ e^k`` as (shift, numerator,
denominator), both divided by ``e^shift``. Merging two rescales to the larger shift, so a row is
never scaled by a key that it does not see. The functions below take either a Sums or a plain tensor
(whose merge is the sum): the fast paths run on tensors, the safe ones on Sums.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import decisions
from .scan import scan

# How far exponents (keys and biases together) may spread for plain float32 sums with one shift:
# e^±70 is normal and leaves room for millions of terms, e^-88 would be flushed and e^88 overflow.
FAST_SPREAD = 70.0
# Without causality every row sees the largest key: only the bias can starve it, and what is flushed
# is below e^(60 - 88) of the sum.
FAST_BIAS_SPREAD = 60.0
# A look at the result of a pass over fewer numbers takes longer than another pass.
FEWEST_TO_LOOK = 2**15
# On a GPU Inductor cuts longer scans into parts, and that of torch 2.11 fails then where what is
# scanned holds a number per column.
LONGEST_SCAN = 128


class Sums(NamedTuple):
    """Shifted numerator and denominator; no key yet is (lowest, 0, 0)."""

    shift: Tensor
    numerator: Tensor
    denominator: Tensor


Summable = Sums | Tensor


def choose(
    condition: Tensor | bool,
    fast: Callable[..., Tensor],
    safe: Callable[..., Tensor],
    *operands: Tensor,
) -> Tensor:
    """``fast(*operands)`` if the scalar condition holds, else ``safe(*operands)``; compiles."""
    if decisions.repeating():
        return fast(*operands) if decisions.repeat() else safe(*operands)
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled() and any(x.requires_grad for x in operands):
            return _choose_once(condition, fast, safe, operands)
        return torch.cond(condition, fast, safe, operands)
    if isinstance(condition, Tensor) and condition.is_meta:  # shapes only: no value to decide on
        return fast(*operands)
    return fast(*operands) if decisions.record(_holds(condition)) else safe(*operands)


def _holds(condition: Tensor | bool) -> bool:
    """The condition, or False where torch.func.vmap hides it: the safe form serves always."""
    try:
        return bool(condition)
    except RuntimeError:
        if transformed(condition):
            return False
        raise


def transformed(*tensors: Tensor) -> bool:
    """Whether a transform of torch.func holds one of them; it sees plain operations only."""
    return any(torch.func.debug_unwrap(x) is not x for x in tensors)


def _choose_once(
    condition: Tensor,
    fast: Callable[..., Tensor],
    safe: Callable[..., Tensor],
    operands: tuple[Tensor, ...],
) -> Tensor:
    """:func:`choose` for a compiled graph with a gradient.

    The backward pass of torch.cond runs the branches anew. So `fast` stands outside of it, on zeros
    where it does not hold: there its output is dropped, and its gradients are zeros.
    """
    quick = fast(*(torch.where(condition, x, 0) for x in operands))

    def nothing(*operands: Tensor) -> Tensor:
        return operands[0].new_zeros(quick.shape)

    return torch.where(condition, quick, torch.cond(condition, nothing, safe, operands))


def lowest(dtype: torch.dtype) -> float:
    """The shift that stands for no key; −inf would give NaN when two of them meet."""
    return torch.finfo(dtype).min


def spread(key: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Largest minus smallest visible key along `dim`, for the worst column; −inf is hidden.

    Columns in which every key is hidden give −inf and do not count.
    """
    key = key.detach()
    if decisions.recording():
        return key.new_tensor(torch.inf)
    return (key.amax(dim) - _smallest(key, dim)).amax()


def _smallest(key: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """The smallest visible key along `dim`, in one pass less where a look tells that all are."""
    looks = not torch.compiler.is_compiling() and key.numel() >= FEWEST_TO_LOOK
    if looks and key.device.type == 'cpu' and not decisions.repeating() and not transformed(key):
        low = key.amin(dim)
        if low.isfinite().all():
            return low
    return key.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf).amin(dim)


def zero_if_finite(x: Tensor) -> Tensor:
    """0, or NaN, for which no comparison holds, where the sum of x is NaN or infinite."""
    total = x.detach().sum()
    return total - total


def column_shift(key: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Detached maximum along `dim` (kept), finite also where every key is hidden."""
    return key.detach().amax(dim, keepdim=True).clamp_min(lowest(key.dtype))


def leaf(key: Tensor, value: Tensor) -> Sums:
    """Each token as a sum of one."""
    shift = key.detach().clamp_min(lowest(key.dtype))
    weight = torch.exp(key - shift)
    return Sums(shift, weight * value, weight)


def reduce(key: Tensor, value: Tensor, dim: int) -> Sums:
    """The sum over `dim` (kept)."""
    shift = column_shift(key, dim)
    weight = torch.exp(key - shift)
    return Sums(shift, (weight * value).sum(dim, True), weight.sum(dim, True))


def merge(a: Summable, b: Summable) -> Summable:
    """The sum of two sums, shapes broadcast."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a + b
    shift = torch.maximum(a.shift, b.shift)
    scale_a, scale_b = torch.exp(a.shift - shift), torch.exp(b.shift - shift)
    return Sums(
        shift,
        a.numerator * scale_a + b.numerator * scale_b,
        a.denominator * scale_a + b.denominator * scale_b,
    )


def join(sums: Sums, key: Tensor, value: Tensor) -> Sums:
    """The sum with a token more; ``merge(sums, leaf(key, value))`` in fewer operations."""
    shift = torch.maximum(sums.shift, key)
    scale, weight = torch.exp(sums.shift - shift), torch.exp(key - shift)
    return Sums(
        shift,
        torch.addcmul(value * weight, sums.numerator, scale),
        torch.addcmul(weight, sums.denominator, scale),
    )


def over(x: Summable, function: Callable[[Tensor], Tensor]) -> Summable:
    """`function` (a view, say) on the tensor or on the three parts."""
    return function(x) if isinstance(x, Tensor) else Sums(*map(function, x))


def _fill(x: Tensor, amount: tuple[int, int], dim: int, value: float) -> Tensor:
    """Pad `dim` by (before, after); negative amounts cut."""
    pad = [0, 0] * (x.dim() - 1 - dim % x.dim()) + list(amount)
    return F.pad(x, pad, value=value)


def pad(x: Summable, before: int, after: int, dim: int) -> Summable:
    """Pad with empty sums; negative amounts cut."""
    if isinstance(x, Tensor):
        return _fill(x, (before, after), dim, 0.0)
    return Sums(
        _fill(x.shift, (before, after), dim, lowest(x.shift.dtype)),
        _fill(x.numerator, (before, after), dim, 0.0),
        _fill(x.denominator, (before, after), dim, 0.0),
    )


def _length(x: Summable, dim: int) -> int:
    return (x if isinstance(x, Tensor) else x.numerator).shape[dim]


def move(x: Summable, steps: int, dim: int) -> Summable:
    """``y[t] = x[t − steps]``, empty where that falls outside."""
    length = _length(x, dim)
    steps = max(-length, min(length, steps))
    return pad(x, steps, -steps, dim)


def sliding(x: Summable, before: int, after: int, dim: int) -> Summable:
    """``y[t] = Σ x[t − before … t + after]``; a negative bound leaves tokens near t out.

    Doubles the length until the window is composed: O(log) passes, and nothing is subtracted.
    """
    length = _length(x, dim)
    if not decisions.repeating():  # a graph that leaves the length open does not know what to save
        before, after = min(before, length - 1), min(after, length - 1)
    need = before + after + 1
    if need < 1:
        return move(x, length, dim)
    # Grow the sequence so that windows which end beyond it exist, then read at t + after.
    x = pad(x, 0, max(after, 0), dim)
    result, have, power, size = None, 0, x, 1
    while True:
        if need & size:
            result = power if result is None else merge(result, move(power, have, dim))
            have += size
        if have == need:
            break
        power = merge(power, move(power, size, dim))
        size *= 2
    return pad(result, -after, 0, dim) if after >= 0 else move(result, -after, dim)


def running_sum(x: Tensor, dim: int) -> Tensor:
    """``x.cumsum(dim)``, which a compiler of any device can fuse with what makes x."""
    length = x.shape[dim]
    if not torch.compiler.is_compiling() or decisions.repeating() or length <= LONGEST_SCAN:
        return scan(x, dim)
    blocks = pad(x, 0, -length % LONGEST_SCAN, dim).unflatten(dim, (-1, LONGEST_SCAN))
    inside = blocks.cumsum(dim + 1)
    before = move(inside.select(dim + 1, -1).cumsum(dim), 1, dim)
    return (inside + before.unsqueeze(dim + 1)).flatten(dim, dim + 1).narrow(dim, 0, length)


def prefix(x: Summable, dim: int) -> Summable:
    """Inclusive running sum along `dim`."""
    if isinstance(x, Tensor):
        return running_sum(x, dim)
    step = 1
    while step < _length(x, dim):
        x = merge(x, move(x, step, dim))
        step *= 2
    return x


def suffix(x: Summable, dim: int) -> Summable:
    """Inclusive running sum from the end."""

    def flip(part: Tensor) -> Tensor:
        return part.flip(dim)

    return over(prefix(over(x, flip), dim), flip)


def total(x: Summable, dim: int) -> Summable:
    """The sum over `dim` (kept)."""
    if isinstance(x, Tensor):
        return x.sum(dim, True)
    shift = x.shift.amax(dim, keepdim=True)
    scale = torch.exp(x.shift - shift)
    parts = (part * scale for part in (x.numerator, x.denominator))
    return Sums(shift, *(part.sum(dim, True) for part in parts))


def mean(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Numerator over denominator, 0 where nothing was seen.

    A quotient, not a product with the reciprocal: its gradient squares 1 / denominator, which
    overflows long before the quotient's does. Nothing seen is divided by ∞, so that no gradient
    passes there, where one over a tiny number would be infinite, and 0 · ∞ is NaN.
    """
    if not torch.is_grad_enabled():
        return numerator / denominator.clamp_min(torch.finfo(denominator.dtype).tiny)
    nothing = denominator < torch.finfo(denominator.dtype).tiny
    return numerator / denominator.masked_fill(nothing, torch.inf)


def mean_in_place(numerator: Tensor, denominator: Tensor) -> Tensor:
    """:func:`mean` over a numerator that nobody else holds; see :func:`product_in_place`."""
    if torch.is_grad_enabled():
        return mean(numerator, denominator)
    return numerator.div_(denominator.clamp_min(torch.finfo(denominator.dtype).tiny))


def product_in_place(x: Tensor, factor: Tensor) -> Tensor:
    """``x · factor``, written over x without autograd: fresh pages cost more than the product."""
    return x * factor if torch.is_grad_enabled() else x.mul_(factor)
