from typing import Any, NamedTuple

import torch
from torch import Tensor

from aft_mm.checks import check_choice, check_int, refuse

from . import checks
from .online_softmax import ShiftedSum, append, column_shift, lowest, reduce, relu_terms

# Position of a state that a later step has overwritten.
USED_UP = -1
# If older tokens weigh e^40 times more, the buffer is below rounding.
MAX_LEAD = 40.0


class StepState(NamedTuple):
    """Sums [B, 1, D] of the tokens that left the buffer, the buffer [B, n, ...], next index [B].

    Token t is in slot t mod n; the keys of empty slots are −inf.
    """

    sums: ShiftedSum
    keys: Tensor
    values: Tensor
    position: Tensor


def new_state(
    batch_size: int,
    embed_dims: int,
    size: int,
    device: torch.device | str | None,
    dtype: torch.dtype,
    heads: int | None = None,
) -> StepState:
    """Return the state before the first token, with a buffer of n = `size` tokens."""
    check_int('batch_size', batch_size, 0)
    check_int('embed_dims', embed_dims, 1)
    check_int('num_tokens', size, 0)
    if dtype not in checks.FLOATS:
        refuse('dtype', 'float64, float32, bfloat16 or float16', dtype)
    options: dict[str, Any] = dict(device=device, dtype=dtype)
    keys = torch.full((batch_size, size, heads or embed_dims), -torch.inf, **options)
    values = torch.zeros(batch_size, size, embed_dims, **options)
    shift = torch.full((batch_size, 1, embed_dims), lowest(dtype), **options)
    # Separate tensors, because steps write to them.
    numerator, denominator = torch.zeros_like(shift), torch.zeros_like(shift)
    position = torch.zeros(batch_size, dtype=torch.long, device=device)
    return StepState(ShiftedSum(shift, numerator, denominator), keys, values, position)


def check_kind(state: StepState) -> StepState:
    if not isinstance(state, StepState):
        refuse('state', 'the result of init_state, prefill or a step', state)
    return state


def check_state(state: StepState, tokens: int | None = None) -> None:
    """Check that a step may follow the state, which must hold fewer than `tokens` tokens."""
    check_position(check_kind(state).position, tokens)


def check_position(position: Tensor, tokens: int | None = None) -> None:
    """Check, where values can be read, that the position [B] is below `tokens` and not used up."""
    if position.device.type != 'cpu' or torch.compiler.is_compiling() or not position.numel():
        return
    # Faster than three torch operations.
    positions = position.tolist()
    if min(positions) < 0:
        raise ValueError(
            'state must be the result of the last step, got one that a later step has overwritten'
        )
    if tokens is not None and max(positions) >= tokens:
        raise ValueError(
            f'state must hold at most {tokens} tokens, got one more; a layer takes steps up to the '
            'end of its grid, so build it with a longer one'
        )


def use_up(position: Tensor) -> None:
    if position.device.type == 'cpu':
        position.fill_(USED_UP)


def per_channel(key: Tensor, value: Tensor) -> Tensor:
    """Return keys per head [..., h] as keys per channel [..., D]."""
    channels = value.shape[-1] // key.shape[-1]
    return key if channels == 1 else key.repeat_interleave(channels, -1)


def faded(sums: ShiftedSum, amount: Tensor) -> ShiftedSum:
    """Return the sums times ``e^−amount``, with a denominator near 1.

    ``shift − amount`` would be rounded next to a key of 1e12, so the sums take its error, as far as
    they do not overflow or vanish. The shift of an empty sum stays the lowest.
    """
    tiny = torch.finfo(amount.dtype).tiny
    size = sums.denominator.clamp_min(tiny).log()
    shift = (sums.shift + (size - amount)).clamp_min(lowest(amount.dtype))
    exponent = ((sums.shift - shift) - amount).minimum(MAX_LEAD - size.clamp_min(0))
    scale = torch.exp(exponent.maximum(-MAX_LEAD - size))
    return ShiftedSum(shift, sums.numerator * scale, sums.denominator * scale)


class BufferSums(NamedTuple):
    """``Σ e^(k + w) v`` and ``Σ e^(k + w)`` of the buffer [B, 1, D], divided by e^(high + rest).

    high, the largest key, is separate, because ``high + rest`` would round the bias.
    """

    high: Tensor
    rest: Tensor
    numerator: Tensor
    denominator: Tensor


def buffer_sums(state: StepState, bias: Tensor) -> BufferSums:
    """Return the sums of the buffer with w [B, n] or [B, n, h], −inf where hidden."""
    bias = bias.to(state.keys.dtype)
    high = column_shift(state.keys, 1)
    weights = (state.keys - high).add_(bias if bias.dim() == 3 else bias.unsqueeze(-1))
    rest = column_shift(weights, 1)
    weights = per_channel(weights.sub_(rest).exp_(), state.values)
    high, rest = per_channel(high, state.values), per_channel(rest, state.values)
    denominator = weights.sum(1, True)
    return BufferSums(high, rest, weights.mul_(state.values).sum(1, True), denominator)


def add_outside(near: BufferSums, outside: ShiftedSum) -> tuple[Tensor, Tensor]:
    lead = ((outside.shift - near.high).sub_(near.rest)).clamp_max_(MAX_LEAD).exp_()
    return (
        torch.addcmul(near.numerator, outside.numerator, lead),
        torch.addcmul(near.denominator, outside.denominator, lead),
    )


def slot_tokens(last: Tensor, size: int) -> Tensor:
    """Return the token in each slot, [B, n], once token `last` [B] is stored; negative if empty."""
    slots = torch.arange(size, device=last.device)
    return last[:, None] - (last[:, None] - slots) % size


def common_position(position: Tensor) -> int | None:
    """Return the position that all sequences share; None if they differ or off the CPU."""
    if position.device.type != 'cpu' or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    positions = position.tolist()
    first = positions[0] if positions else None
    return first if positions.count(first) == len(positions) else None


def push(state: StepState, key: Tensor, value: Tensor, update_sums: bool) -> StepState:
    """Store the token in place; with `update_sums` add the one that it replaces to the sums."""
    size, sums, buffers = state.keys.shape[1], state.sums, (state.keys, state.values)
    position = common_position(state.position)
    if position is not None:  # faster than an index per sequence
        old_key, old_value = (x.narrow(1, position % size, 1) for x in buffers)
    else:
        slot = (state.position % size).view(-1, 1, 1)
        slots = [slot.expand(-1, 1, x.shape[2]) for x in buffers]
        old_key, old_value = (x.gather(1, at) for x, at in zip(buffers, slots, strict=True))
    if update_sums and (position is None or position >= size):  # else the slot is empty
        sums = append(sums, per_channel(old_key, old_value), old_value)
    if position is not None:
        old_key.copy_(key.unsqueeze(1))
        old_value.copy_(value.unsqueeze(1))
    else:
        for x, at, new in zip(buffers, slots, (key, value), strict=True):
            x.scatter_(1, at, new.to(x.dtype).unsqueeze(1))
    return StepState(sums, *buffers, state.position + 1)


@torch.no_grad()
def prefill(
    state: StepState,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    *,
    key_function: str = 'softmax',
    decay: Tensor | None = None,
) -> StepState:
    """Return the state after the first lengths[b] tokens of each prompt, in one parallel pass.

    Args:
        state: A fresh state, from the ``init_state`` of any op.
        key: [B, L, D], [B, L, h] for aft_conv.
        value: [B, L, D].
        lengths: Tokens of each prompt [B], 0 to L; the rest is padding, which may hold NaN.
        key_function: That of :func:`aft_simple`.
        decay: λ [D] of :func:`aft_decay`.

    Raises:
        ValueError: If the state is used or of another op or size, or a length is outside 0 to L.
    """
    check_choice('key_function', key_function, checks.KEY_FUNCTIONS)
    check_state(state)
    checks.check_prefill(key, value, lengths, state.position, state.keys, state.values)
    checks.check_terms(state.sums.numerator, value, key_function)
    size, dtype = state.keys.shape[1], state.keys.dtype
    key, value = key.to(dtype), value.to(dtype)
    indices = torch.arange(key.shape[1], device=key.device)
    if decay is not None:
        checks.check_decay(decay, value)
        checks.check_buffer(size, 0)
    has_left = (indices < lengths[:, None] - size).unsqueeze(-1)
    old_value = value.masked_fill(~has_left, 0)
    if key_function != 'softmax':
        terms = relu_terms(key.masked_fill(~has_left, 0), old_value, key_function)
        sums = state.sums._replace(numerator=terms.sum(1, True))
    else:
        old_key = per_channel(key.masked_fill(~has_left, -torch.inf), old_value)
        if decay is None:
            sums = reduce(old_key, old_value, 1)
        else:
            high, age = column_shift(old_key, 1), (lengths[:, None] - 1 - indices).unsqueeze(-1)
            lost = (decay.to(dtype) * age).masked_fill(age <= 0, 0)  # not 0 · ∞
            sums = reduce((old_key - high) - lost, old_value, 1)
            rest = sums.shift.masked_fill(sums.denominator == 0, 0)
            sums = faded(sums._replace(shift=high), -rest)
    tokens = slot_tokens(lengths - 1, size).unsqueeze(-1)
    keys, values = (
        x.gather(1, tokens.clamp_min(0).expand(-1, -1, x.shape[2])).masked_fill(tokens < 0, empty)
        for x, empty in ((key, -torch.inf), (value, 0))
    )
    return StepState(sums, keys, values, lengths.to(state.position, copy=True))


def select(state: Any, rows: Tensor) -> Any:
    """Return the state of any op for the sequences rows [N] of the batch, as a copy."""
    if isinstance(state, Tensor):
        return state.index_select(0, rows)
    if isinstance(state, (tuple, list)):
        parts = [select(part, rows) for part in state]
        return type(state)(*parts) if hasattr(state, '_fields') else type(state)(parts)
    return state
