"""The state of a causal op between steps, and what every step does with it."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from aft_mm.checks import check_choice, check_int, refuse

from . import checks
from .eager.mixing import relu_terms
from .eager.sums import Sums, column_shift, join, lowest, reduce

# The position of a state that a step has taken.
USED_UP = -1
# The nats by which sums of far tokens lead beyond which those of the buffer are below any rounding.
FAR_LEAD = 40.0


class StepState(NamedTuple):
    """Sums of the tokens that left the buffer [B, 1, D], the buffer [B, n, ...], next index [B].

    Token t lies in slot t mod n; the keys of empty slots are −inf.
    """

    sums: Sums
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
    """The state before the first token, with room for `size` tokens; key heads h are D or given."""
    check_int('batch_size', batch_size, 0)
    check_int('embed_dims', embed_dims, 1)
    check_int('num_tokens', size, 0)
    if dtype not in checks.FLOATS:
        refuse('dtype', 'float64, float32, bfloat16 or float16', dtype)
    options = dict(device=device, dtype=dtype)
    keys = torch.full((batch_size, size, heads or embed_dims), -torch.inf, **options)
    values = torch.zeros(batch_size, size, embed_dims, **options)
    shift = torch.full((batch_size, 1, embed_dims), lowest(dtype), **options)
    # Each a tensor of its own: steps write into them.
    numerator, denominator = torch.zeros_like(shift), torch.zeros_like(shift)
    position = torch.zeros(batch_size, dtype=torch.long, device=device)
    return StepState(Sums(shift, numerator, denominator), keys, values, position)


def check_kind(state: StepState) -> StepState:
    """Check that it is a state at all, before anything of it is read."""
    if not isinstance(state, StepState):
        refuse('state', 'what init_state, prefill or a step gave', state)
    return state


def check_state(state: StepState, tokens: int | None = None) -> None:
    """Check a state that a step may go on from, one of fewer than `tokens` tokens."""
    check_position(check_kind(state).position, tokens)


def check_position(position: Tensor, tokens: int | None = None) -> None:
    """Check the position [B] of a state: not used up, and before `tokens`.

    On a CPU only: elsewhere a look would wait for everything before it. Nor does a compiled graph
    look, which would break it.
    """
    if position.device.type != 'cpu' or torch.compiler.is_compiling() or not position.numel():
        return
    # As ints of Python: a comparison, its `any` and its `bool` are three operations of torch.
    positions = position.tolist()
    if min(positions) < 0:
        raise ValueError(
            'state must be the one that the last step gave, got one that a step has used up and '
            'written over'
        )
    if tokens is not None and max(positions) >= tokens:
        raise ValueError(f'the state and the position bias hold {tokens} tokens, got one more')


def use_up(position: Tensor) -> None:
    """Mark a state whose buffers a step has written over, where :func:`check_position` looks."""
    if position.device.type == 'cpu':
        position.fill_(USED_UP)


def per_channel(key: Tensor, value: Tensor) -> Tensor:
    """Keys per head [..., h] for each of the channels [..., D]."""
    channels = value.shape[-1] // key.shape[-1]
    return key if channels == 1 else key.repeat_interleave(channels, -1)


class BufferSums(NamedTuple):
    """``Σ e^(k + w) v`` and ``Σ e^(k + w)`` of the buffer, [B, 1, D], over ``e^(high + rest)``.

    high is the largest key. In the sum of the two the bias would be rounded like the largest key.
    """

    high: Tensor
    rest: Tensor
    numerator: Tensor
    denominator: Tensor


def buffer_sums(state: StepState, bias: Tensor) -> BufferSums:
    """The sums of the buffer with the bias w [B, n], or [B, n, h] per head, −inf being hidden."""
    bias = bias.to(state.keys.dtype)
    high = column_shift(state.keys, 1)
    # In place: the buffer is read once, and the rest is too small to leave the cache.
    weights = (state.keys - high).add_(bias if bias.dim() == 3 else bias.unsqueeze(-1))
    rest = column_shift(weights, 1)
    weights = per_channel(weights.sub_(rest).exp_(), state.values)
    high, rest = per_channel(high, state.values), per_channel(rest, state.values)
    denominator = weights.sum(1, True)
    return BufferSums(high, rest, weights.mul_(state.values).sum(1, True), denominator)


def with_far(near: BufferSums, far: Sums) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of the buffer and of what left it, over the shift of the former."""
    # Beside far sums that lead by more the buffer is nothing, and e^40 overflows no sum.
    lead = ((far.shift - near.high).sub_(near.rest)).clamp_max_(FAR_LEAD).exp_()
    return (
        torch.addcmul(near.numerator, far.numerator, lead),
        torch.addcmul(near.denominator, far.denominator, lead),
    )


def slot_tokens(last: Tensor, size: int) -> Tensor:
    """Which token each slot holds once token `last` [B] is in, [B, n]; negative where empty."""
    slots = torch.arange(size, device=last.device)
    return last[:, None] - (last[:, None] - slots) % size


def common_position(position: Tensor) -> int | None:
    """The position [B] if it is the same everywhere and nothing waits for the look, as on a CPU."""
    if position.device.type != 'cpu' or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return None
    positions = position.tolist()
    first = positions[0] if positions else None
    return first if positions.count(first) == len(positions) else None


def push(state: StepState, key: Tensor, value: Tensor, keep_sums: bool) -> StepState:
    """Store the token in place; what it overwrites joins the sums."""
    size, sums, buffers = state.keys.shape[1], state.sums, (state.keys, state.values)
    position = common_position(state.position)
    if position is not None:  # places as views take half as long as an index for each sequence
        old_key, old_value = (x.narrow(1, position % size, 1) for x in buffers)
    else:
        slot = (state.position % size).view(-1, 1, 1)
        slots = [slot.expand(-1, 1, x.shape[2]) for x in buffers]
        old_key, old_value = (x.gather(1, at) for x, at in zip(buffers, slots, strict=True))
    if keep_sums and (position is None or position >= size):  # else the place is empty
        sums = join(sums, per_channel(old_key, old_value), old_value)
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
) -> StepState:
    """The state after the first lengths[b] tokens of key and value [B, L, D], in one parallel pass.

    `state` is fresh from the ``init_state`` of any op; `key_function` is that of aft_simple.
    lengths [B] are 0 … L; tokens past them are padding, NaN allowed. Raises ValueError for a state
    that has taken a token or was made for another op or size, and for lengths outside 0 … L.
    """
    check_choice('key_function', key_function, checks.KEY_FUNCTIONS)
    check_state(state)
    checks.check_prefill(key, value, lengths, state.position, state.keys, state.values)
    checks.check_terms(state.sums.numerator, value, key_function)
    size, dtype = state.keys.shape[1], state.keys.dtype
    key, value = key.to(dtype), value.to(dtype)
    left = (torch.arange(key.shape[1], device=key.device) < lengths[:, None] - size).unsqueeze(-1)
    old = value.masked_fill(~left, 0)
    if key_function != 'softmax':
        terms = relu_terms(key.masked_fill(~left, 0), old, key_function)
        sums = state.sums._replace(numerator=terms.sum(1, True))
    else:
        sums = reduce(per_channel(key.masked_fill(~left, -torch.inf), old), old, 1)
    tokens = slot_tokens(lengths - 1, size).unsqueeze(-1)
    keys, values = (
        x.gather(1, tokens.clamp_min(0).expand(-1, -1, x.shape[2])).masked_fill(tokens < 0, empty)
        for x, empty in ((key, -torch.inf), (value, 0))
    )
    return StepState(sums, keys, values, lengths.to(state.position, copy=True))


def select(state: Any, rows: Tensor) -> Any:
    """The state of the sequences rows [N] of its batch, in this order, with tensors of its own.

    `state` may be of any op, or tuples and lists of such; the first axis of every tensor is B.
    """
    if isinstance(state, Tensor):
        return state.index_select(0, rows)
    if isinstance(state, (tuple, list)):
        parts = [select(part, rows) for part in state]
        return type(state)(*parts) if hasattr(state, '_fields') else type(state)(parts)
    return state
