"""AFT-decay: AFT-simple whose keys lose weight by ``e^−λ`` per token, in O(T·D).

Sums run inside blocks, over keys that grow by λ per token, and then over blocks. A sum is relative
to the place of one token; :func:`_fade` moves it to a later one.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..online_softmax import (
    FAST_RANGE,
    ShiftedSum,
    add,
    apply_gate,
    column_shift,
    from_token,
    hide,
    key_range,
    lowest,
    map_parts,
    mean,
    running_sum,
    shift,
    zero_if_finite,
)
from ..path_choice import choose
from ..state import StepState, faded
from ..tracing import may_read
from .full_batched import WIDE_RANGE
from .steps import aft_simple_step

BLOCK = 32
NO_WEIGHT = 800.0  # e^−800 is 0 in float64


def aft_decay(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    *,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_decay` in O(T·D)."""
    dtype = value.dtype
    key, value = hide(key, value, key_mask)

    def fast(key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
        # Next to a key of 1e4 float32 would lose λ.
        key = key - column_shift(key, 1)
        sums = _both_sides(_block_sums, key, value, decay, causal)
        return mean(sums.numerator, sums.denominator)

    def wide(key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
        return fast(key.double(), value.double(), decay.double()).to(key.dtype)

    def safe(key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
        wide_decay = decay.double()
        tokens = _without_gaps(key.double(), wide_decay), value.double(), wide_decay
        sums = _both_sides(_token_sums, *tokens, causal)
        return mean(sums.numerator, sums.denominator).to(key.dtype)

    def otherwise(key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
        if not may_read(key):  # a graph makes one choice
            return safe(key, value, decay)
        return choose(in_blocks <= WIDE_RANGE, wide, safe, key, value, decay)

    operands = key, value, decay.to(key.dtype)
    # NaN in a key or value also reaches earlier rows of its block.
    in_blocks = key_range(_blocks(_faded_keys(*operands[::2]), -torch.inf), 2)
    in_blocks = in_blocks + zero_if_finite(value)
    is_exact = torch.maximum(in_blocks, key_range(key, 1)) <= FAST_RANGE
    mixed = choose(is_exact, fast, otherwise, *operands)
    return apply_gate(query, mixed, gate, dtype)


def aft_decay_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    *,
    gate: str,
) -> tuple[Tensor, StepState]:
    """Add the token to the sums of AFT-simple, which have lost λ."""
    state = state._replace(sums=faded(state.sums, decay.to(state.values.dtype)))
    options: dict[str, Any] = dict(key_function='softmax', gate=gate)
    return aft_simple_step(state, query, key, value, **options)


def _both_sides(
    sums_of: Callable[..., ShiftedSum], key: Tensor, value: Tensor, decay: Tensor, causal: bool
) -> ShiftedSum:
    """Return the sums [B, T, D] over the tokens up to each, and, unless causal, over later ones."""
    sums = sums_of(key, value, decay)
    if causal:
        return sums
    later = _fade(shift(sums_of(key.flip(1), value.flip(1), decay), 1, 1), decay)
    return add(sums, map_parts(later, lambda part: part.flip(1)))


def _without_gaps(key: Tensor, decay: Tensor) -> Tensor:
    """Shorten differences of keys after which e^k is 0 whatever the decay: a key of 1e12 loses λ."""
    finite = key.detach().clamp_min(lowest(key.dtype))
    ordered, places = finite.sort(1)
    gaps = ordered.diff(dim=1, prepend=ordered[:, :1])
    near = torch.minimum(gaps, decay.detach().abs() * key.shape[1] + NO_WEIGHT).cumsum(1)
    near = torch.zeros_like(near).scatter(1, places, near)
    # The gradient is that of the keys; a hidden one stays −∞.
    return torch.where(key == -torch.inf, key, near + (key - finite))


def _token_sums(key: Tensor, value: Tensor, decay: Tensor) -> ShiftedSum:
    return _prefix(from_token(key, value), decay)


def _block_sums(key: Tensor, value: Tensor, decay: Tensor) -> ShiftedSum:
    """Return the sums if the exponents inside a block have a small range."""
    tokens = key.shape[1]
    local, values = _blocks(_faded_keys(key, decay), -torch.inf), _blocks(value, 0.0)
    largest = column_shift(local, 2)
    weight = torch.exp(local - largest)
    numerator, denominator = running_sum(weight * values, 2), running_sum(weight, 2)
    whole = ShiftedSum(largest, numerator[:, :, -1:], denominator[:, :, -1:])
    totals = _prefix(_fade(whole, decay * (BLOCK - 1)), decay * BLOCK)
    before = _fade(shift(totals, 1, 1), decay)
    # A row that sees none of its block has no share in the shift.
    seen = largest.expand_as(denominator).masked_fill(denominator == 0, lowest(key.dtype))
    sums = add(ShiftedSum(seen, numerator, denominator), before)
    rows = ShiftedSum(*(part.flatten(1, 2)[:, :tokens] for part in sums))
    return _fade(rows, _places(tokens, decay))


def _places(tokens: int, decay: Tensor) -> Tensor:
    """Return ``λ i`` [T, D] for the place i of each token in its block."""
    return decay * (torch.arange(tokens, device=decay.device) % BLOCK)[:, None]


def _faded_keys(key: Tensor, decay: Tensor) -> Tensor:
    return key + _places(key.shape[1], decay)


def _blocks(x: Tensor, fill: float) -> Tensor:
    padded = F.pad(x, (0, 0, 0, -x.shape[1] % BLOCK), value=fill)
    blocks: Tensor = padded.unflatten(1, (-1, BLOCK))
    return blocks


def _fade(sums: ShiftedSum, amount: Tensor) -> ShiftedSum:
    return sums._replace(shift=sums.shift - amount)


def _prefix(sums: ShiftedSum, decay: Tensor) -> ShiftedSum:
    """Return the running sums along axis 1, whose entries are `decay` apart."""
    step = 1
    while step < sums.numerator.shape[1]:
        sums = add(sums, _fade(shift(sums, step, 1), decay * step))
        step *= 2
    return sums
