"""Steps on the state of `ops/state.py`, called by `ops/steps.py`.

query and value are [B, D], key [B, D] or [B, h], the buffer [B, n, ·], sums of older tokens [B, 1, D].
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..geometry import Window, hard_mask, kernel_index, near_mask, near_radius
from ..online_softmax import append, apply_gate, mean, relu_terms
from ..state import StepState, add_outside, buffer_sums, common_position, push, slot_tokens
from .simple import apply_relu2_gates

# Biases of the n slots of a buffer at token t [B], [B, n] or [B, n, h].
SlotBias = Callable[[Tensor, int], Tensor]


def aft_simple_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    key_function: str,
    gate: str,
) -> tuple[Tensor, StepState]:
    dtype = state.values.dtype
    wide_key, wide_value = key.to(dtype).unsqueeze(1), value.to(dtype).unsqueeze(1)
    if key_function != 'softmax':
        numerator = state.sums.numerator + relu_terms(wide_key, wide_value, key_function)
        # A copy, as without a gate the output would be the state, which later steps write to.
        sums, mixed = state.sums._replace(numerator=numerator), numerator.clone()
    else:
        sums = append(state.sums, wide_key, wide_value)
        mixed = mean(sums.numerator, sums.denominator)
    state = state._replace(sums=sums, position=state.position + 1)
    if key_function == 'relu2':
        return apply_relu2_gates(query, mixed.squeeze(1), value.dtype), state
    return apply_gate(query, mixed.squeeze(1), gate, value.dtype), state


def aft_full_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    gate: str,
) -> tuple[Tensor, StepState]:
    slot_bias = _slot_bias(lambda t, s: position_bias[t, s])
    return _step(state, query, key, value, slot_bias, gate, global_term=False)


def aft_local_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None,
    *,
    window: Window,
    grid: Sequence[int] | None,
    gate: str,
) -> tuple[Tensor, StepState]:
    slot_bias = _near_slot_bias(pos_u, pos_v, window, grid, state.keys.dtype)
    return _step(state, query, key, value, slot_bias, gate, global_term=True)


def aft_conv_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool,
    gate: str,
) -> tuple[Tensor, StepState]:
    outside = 0.0 if global_connectivity else -torch.inf

    def kernel_bias(target: Tensor, source: Tensor) -> Tensor:
        index = kernel_index(target, source, weight.shape[1:], grid)
        bias = weight.flatten(1).T[index.clamp_min(0)]  # [B, n, h]
        return bias.masked_fill((index < 0).unsqueeze(-1), outside)

    return _step(state, query, key, value, _slot_bias(kernel_bias), gate, global_connectivity)


def aft_local_hard_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    window: Window,
    grid: Sequence[int] | None,
    gate: str,
) -> tuple[Tensor, StepState]:
    def window_bias(target: Tensor, source: Tensor) -> Tensor:
        return torch.where(hard_mask(target, source, window, grid, causal=True), 0.0, -torch.inf)

    return _step(state, query, key, value, _slot_bias(window_bias), gate, global_term=False)


def aft_local_learned_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None,
    *,
    window: Window,
    grid: Sequence[int] | None,
    gate: str,
) -> tuple[Tensor, StepState]:
    target, size = state.position[:, None], state.keys.shape[1]
    bias = _near_slot_bias(pos_u, pos_v, window, grid, state.keys.dtype)(state.position, size)
    bias = bias.masked_fill(slot_tokens(state.position, size) < 0, -torch.inf)
    state = push(state, key, value, update_sums=True)
    # Tokens that left the buffer have W = 1.
    older = (target + 1 - size).clamp_min(0).to(bias.dtype)
    normalizer = torch.logaddexp(bias.logsumexp(1, True), older.log())
    # A row may see no pair.
    normalizer = normalizer.masked_fill(normalizer == -torch.inf, 0)
    near = buffer_sums(state, bias - normalizer)
    keys = buffer_sums(state, torch.zeros_like(bias))
    outside = state.sums
    largest = torch.maximum(near.high, outside.shift)
    numerator = near.numerator * torch.exp((near.high - largest) + near.rest)
    numerator += outside.numerator * torch.exp((outside.shift - largest) - normalizer.unsqueeze(-1))
    denominator = keys.denominator * torch.exp(keys.high - largest)
    denominator += outside.denominator * torch.exp(outside.shift - largest)
    return apply_gate(query, mean(numerator, denominator).squeeze(1), gate, value.dtype), state


def _step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    slot_bias: SlotBias,
    gate: str,
    global_term: bool,
) -> tuple[Tensor, StepState]:
    bias = slot_bias(state.position, state.keys.shape[1])
    state = push(state, key, value, update_sums=global_term)
    near = buffer_sums(state, bias)
    sums = add_outside(near, state.sums) if global_term else (near.numerator, near.denominator)
    mixed = mean(*sums).squeeze(1)
    return apply_gate(query, mixed, gate, value.dtype), state


def _slot_bias(token_bias: Callable[[Tensor, Tensor], Tensor]) -> SlotBias:
    """Return the bias of slots from ``token_bias(t [B, 1], tokens [B, n])``."""

    def slot_bias(position: Tensor, size: int) -> Tensor:
        return token_bias(position[:, None], slot_tokens(position, size).clamp_min(0))

    return slot_bias


def _near_slot_bias(
    pos_u: Tensor,
    pos_v: Tensor | None,
    window: Window,
    grid: Sequence[int] | None,
    dtype: torch.dtype,
) -> SlotBias:
    # A 1-d buffer is as long as the window.
    all_near = (grid is None or len(grid) == 1) and near_radius(window, grid) >= 0

    def token_bias(target: Tensor, source: Tensor) -> Tensor:
        if pos_v is None:
            last = pos_u.shape[1] - 1
            bias = pos_u[target, (last + source - target).clamp(0, last)]
        else:
            # w is an exponent, which autocast must not round.
            bias = (pos_v[source].to(dtype) * pos_u[target].to(dtype)).sum(-1)
        if all_near:
            return bias
        return bias.masked_fill(~near_mask(target, source, window, grid), 0)

    def slot_bias(position: Tensor, size: int) -> Tensor:
        common = common_position(position) if all_near and pos_v is not None else None
        if common is None or pos_v is None or len(pos_v) < size:
            return _slot_bias(token_bias)(position, size)
        # Tokens are contiguous up to the last one written.
        first = max(common + 1 - size, 0)
        rows = pos_v.narrow(0, first, size).to(dtype)
        return (rows * pos_u.select(0, common).to(dtype)).sum(1).roll(first % size).unsqueeze(0)

    return slot_bias
