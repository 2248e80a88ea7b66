"""Steps of the default backend: composite torch operations on the state of `ops/state.py`.

Called by `ops/steps.py`, which checks the arguments and says what a step is.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..geometry import Window, hard_mask, kernel_index, near_mask, near_radius
from ..state import StepState, buffer_sums, common_position, push, slot_tokens, with_far
from .mixing import apply_relu2_gates, relu_terms
from .sums import join, mean
from .tokens import apply_gate

# The bias of every slot of a buffer of n once token t [B] is in, [B, n] or [B, n, h].
Row = Callable[[Tensor, int], Tensor]


def _over_tokens(bias_of: Callable[[Tensor, Tensor], Tensor]) -> Row:
    """The row of which ``bias_of(t [B, 1], tokens [B, n])`` tells the bias of any tokens."""

    def row(position: Tensor, size: int) -> Tensor:
        return bias_of(position[:, None], slot_tokens(position, size).clamp_min(0))

    return row


def _weighted_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias_of: Row,
    gate: str,
    far: bool,
) -> tuple[Tensor, StepState]:
    """A token with the bias ``bias_of(t [B], n)`` of the slots, which is [B, n] or [B, n, h].

    `far`: W = 1 past the buffer.
    """
    bias = bias_of(state.position, state.keys.shape[1])
    state = push(state, key, value, keep_sums=far)
    near = buffer_sums(state, bias)
    sums = with_far(near, state.sums) if far else (near.numerator, near.denominator)
    mixed = mean(*sums).squeeze(1)
    return apply_gate(query, mixed, gate, value.dtype), state


def aft_simple_step(state, query, key, value, *, key_function, gate) -> tuple[Tensor, StepState]:
    """O(D): the token joins the running sums."""
    dtype = state.values.dtype
    wide_key, wide_value = key.to(dtype).unsqueeze(1), value.to(dtype).unsqueeze(1)
    if key_function != 'softmax':
        numerator = state.sums.numerator + relu_terms(wide_key, wide_value, key_function)
        sums, mixed = state.sums._replace(numerator=numerator), numerator
    else:
        sums = join(state.sums, wide_key, wide_value)
        mixed = mean(sums.numerator, sums.denominator)
    state = state._replace(sums=sums, position=state.position + 1)
    if key_function == 'relu2':
        return apply_relu2_gates(query, mixed.squeeze(1), value.dtype), state
    return apply_gate(query, mixed.squeeze(1), gate, value.dtype), state


def aft_full_step(state, query, key, value, position_bias, *, gate) -> tuple[Tensor, StepState]:
    """O(T·D): the row of w weighs every token."""
    row = _over_tokens(lambda t, s: position_bias[t, s])
    return _weighted_step(state, query, key, value, row, gate, far=False)


def _near_row(
    pos_u: Tensor,
    pos_v: Tensor | None,
    window: Window,
    grid: Sequence[int] | None,
    dtype: torch.dtype,
) -> Row:
    # A buffer in 1-d is as long as the window: every token that it holds is near.
    all_near = (grid is None or len(grid) == 1) and near_radius(window, grid) >= 0

    def of_tokens(target: Tensor, source: Tensor) -> Tensor:
        if pos_v is None:
            last = pos_u.shape[1] - 1
            bias = pos_u[target, (last + source - target).clamp(0, last)]
        else:
            # w is an exponent: autocast and low precision stay out of it, as in the parallel form.
            bias = (pos_v[source].to(dtype) * pos_u[target].to(dtype)).sum(-1)
        if all_near:
            return bias
        return bias.masked_fill(~near_mask(target, source, window, grid), 0)

    def row(position: Tensor, size: int) -> Tensor:
        common = common_position(position) if all_near and pos_v is not None else None
        if common is None or len(pos_v) < size:
            return _over_tokens(of_tokens)(position, size)
        # The tokens lie side by side, but for the slots behind the last one written.
        first = max(common + 1 - size, 0)
        rows = pos_v.narrow(0, first, size).to(dtype)
        return (rows * pos_u.select(0, common).to(dtype)).sum(1).roll(first % size).unsqueeze(0)

    return row


def aft_local_step(
    state, query, key, value, pos_u, pos_v, *, window, grid, gate
) -> tuple[Tensor, StepState]:
    """O(r·D): the row of w over the buffer, and the sums of what left it."""
    row = _near_row(pos_u, pos_v, window, grid, state.keys.dtype)
    return _weighted_step(state, query, key, value, row, gate, far=True)


def aft_conv_step(
    state, query, key, value, weight, *, grid, global_connectivity, gate
) -> tuple[Tensor, StepState]:
    """O(r·D): the kernel over the buffer, and the sums of what left it if W = 1 there."""
    outside = 0.0 if global_connectivity else -torch.inf

    def row(target: Tensor, source: Tensor) -> Tensor:
        index = kernel_index(target, source, weight.shape[1:], grid)
        bias = weight.flatten(1).T[index.clamp_min(0)]  # [B, n, h]
        return bias.masked_fill((index < 0).unsqueeze(-1), outside)

    far = global_connectivity
    return _weighted_step(state, query, key, value, _over_tokens(row), gate, far)


def aft_local_hard_step(
    state, query, key, value, *, window, grid, gate
) -> tuple[Tensor, StepState]:
    """O(r·D): the buffer holds the window."""

    def row(target: Tensor, source: Tensor) -> Tensor:
        return torch.where(hard_mask(target, source, window, grid, causal=True), 0.0, -torch.inf)

    return _weighted_step(state, query, key, value, _over_tokens(row), gate, far=False)


def aft_local_learned_step(
    state, query, key, value, pos_u, pos_v, *, window, grid, gate
) -> tuple[Tensor, StepState]:
    """O(r·D): the row of w and the keys over the buffer, and the sums of what left it."""
    target, size = state.position[:, None], state.keys.shape[1]
    bias = _near_row(pos_u, pos_v, window, grid, state.keys.dtype)(state.position, size)
    bias = bias.masked_fill(slot_tokens(state.position, size) < 0, -torch.inf)
    state = push(state, key, value, keep_sums=True)
    # Each token that left the buffer has W = 1.
    left = (target + 1 - size).clamp_min(0).to(bias.dtype)
    total = torch.logaddexp(bias.logsumexp(1, True), left.log())
    near, seen = buffer_sums(state, bias - total), buffer_sums(state, torch.zeros_like(bias))
    far = state.sums
    shift = torch.maximum(near.high, far.shift)
    numerator = near.numerator * torch.exp((near.high - shift) + near.rest)
    numerator += far.numerator * torch.exp((far.shift - shift) - total.unsqueeze(-1))
    everywhere = seen.denominator * torch.exp(seen.high - shift)
    everywhere += far.denominator * torch.exp(far.shift - shift)
    return apply_gate(query, mean(numerator, everywhere).squeeze(1), gate, value.dtype), state
