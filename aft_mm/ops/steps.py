"""Causal ops one token at a time: ``NAME_init_state`` makes a state, ``NAME_step`` takes a token.

Fed the tokens in order, the steps give the rows of the parallel causal op. query, key, value are
[B, D] (key [B, h] for aft_conv, query None with ``gate='none'``), outputs [B, D].
:func:`aft_mm.ops.prefill` takes a whole prompt at once; each sequence counts its own tokens, so
prompts may differ in length. What a step must remember, and what it costs at any position:

=====================  ==========================================================  ================
op                     state per sequence                                          time per step
=====================  ==========================================================  ================
aft_simple             running sums, O(D), two of them for relu2                   O(D)
aft_local              the last r + 1 tokens and sums of those before, O(r·D)      O(r·D)
aft_conv               the same with the reach r of the kernel in raster order     O(r·D)
aft_window             the tokens of the window, O(r·D)                            O(r·D)
aft_local_normalized   as aft_local                                                O(r·D)
aft_full               every token, O(T·D): each row weighs all of them anew       O(T·D)
=====================  ==========================================================  ================

States are float32 (or the `dtype` given), are updated in place and returned; no gradient flows.

No step waits for the device, so that a CUDA graph can hold it. A token past the last one of the
bias or grid raises ValueError on a CPU; elsewhere an index outside a table is left to torch.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import checks
from .eager import apply_gate, apply_relu2_gates, relu_terms
from .geometry import Window, as_pair, hard_mask, kernel_index, near_mask, near_radius
from .state import StepState, buffer_sums, new_state, push, slot_tokens, with_far
from .sums import Sums, leaf, mean, merge


def _weighted_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias_of: Callable[[Tensor, Tensor], Tensor],
    gate: str,
    far: bool,
) -> tuple[Tensor, StepState]:
    """A token with the bias ``bias_of(t [B, 1], tokens [B, n])``, which is [B, n] or [B, n, h].

    `far`: W = 1 past the buffer.
    """
    checks.check_step(query, key, value, gate, state.keys, state.values)
    target = state.position[:, None]
    tokens = slot_tokens(state.position, state.keys.shape[1])
    state = push(state, key, value, keep_sums=far)
    near = buffer_sums(state, bias_of(target, tokens.clamp_min(0)))
    sums = with_far(near, state.sums) if far else (near.numerator, near.denominator)
    mixed = mean(*sums).squeeze(1)
    return apply_gate(query, mixed, gate, value.dtype), state


def aft_simple_init_state(
    batch_size: int,
    embed_dims: int,
    *,
    key_function: str = 'softmax',
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepState:
    """Empty running sums: three tensors [B, 1, D], or [B, 1, 2·D] for relu2 with its two terms."""
    checks.check_choice('key_function', key_function, checks.KEY_FUNCTIONS)
    state = new_state(batch_size, embed_dims, 0, device, dtype)
    if key_function == 'relu2':
        state = state._replace(sums=Sums(*(torch.cat((part, part), -1) for part in state.sums)))
    return state


@torch.no_grad()
def aft_simple_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    key_function: str = 'softmax',
    gate: str = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """One token of causal :func:`aft_simple` at constant cost."""
    checks.check_key_function(key_function, gate)
    checks.check_step(query, key, value, gate, state.keys, state.values)
    checks.check_terms(state.sums.numerator, value, key_function)
    dtype = state.values.dtype
    wide_key, wide_value = key.to(dtype).unsqueeze(1), value.to(dtype).unsqueeze(1)
    if key_function != 'softmax':
        numerator = state.sums.numerator + relu_terms(wide_key, wide_value, key_function)
        sums, mixed = state.sums._replace(numerator=numerator), numerator
    else:
        sums = merge(state.sums, leaf(wide_key, wide_value))
        mixed = mean(sums.numerator, sums.denominator)
    state = state._replace(sums=sums, position=state.position + 1)
    if key_function == 'relu2':
        return apply_relu2_gates(query, mixed.squeeze(1), value.dtype), state
    return apply_gate(query, mixed.squeeze(1), gate, value.dtype), state


def aft_full_init_state(
    batch_size: int,
    embed_dims: int,
    num_tokens: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepState:
    """Room for all `num_tokens` keys and values: every row of w weighs all of them anew."""
    return new_state(batch_size, embed_dims, num_tokens, device, dtype)


@torch.no_grad()
def aft_full_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    gate: str = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """One token of causal :func:`aft_full`; position_bias is w [T, T]."""
    _check_position(state, min(state.keys.shape[1], len(position_bias)))
    return _weighted_step(
        state, query, key, value, lambda t, s: position_bias[t, s], gate, far=False
    )


def aft_local_init_state(
    batch_size: int,
    embed_dims: int,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepState:
    """A buffer as long as the window reaches back in raster order, and running sums."""
    return new_state(batch_size, embed_dims, _local_size(window, grid), device, dtype)


def _local_size(window: Window, grid: Sequence[int] | None) -> int:
    checks.check_window(window, grid)
    return max(near_radius(window, grid), 0) + 1


def _near_row(
    pos_u: Tensor,
    pos_v: Tensor | None,
    window: Window,
    grid: Sequence[int] | None,
    outside: float,
    dtype: torch.dtype,
) -> Callable[[Tensor, Tensor], Tensor]:
    if pos_v is None:
        checks.check_free_bias(pos_u, len(pos_u), window, grid, causal=True)

    def row(target: Tensor, source: Tensor) -> Tensor:
        if pos_v is None:
            last = pos_u.shape[1] - 1
            bias = pos_u[target, (last + source - target).clamp(0, last)]
        else:
            # w is an exponent: autocast and low precision stay out of it, as in the parallel form.
            bias = (pos_v[source].to(dtype) * pos_u[target].to(dtype)).sum(-1)
        return bias.masked_fill(~near_mask(target, source, window, grid), outside)

    return row


@torch.no_grad()
def aft_local_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None = None,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    gate: str = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """One token of causal :func:`aft_local`; pos_u and pos_v are the whole factors [T, d'].

    Without pos_v, pos_u is the whole bias [T, s].
    """
    _check_position(state, len(pos_u))
    checks.check_buffer(state.keys.shape[1], _local_size(window, grid))
    row = _near_row(pos_u, pos_v, window, grid, outside=0.0, dtype=state.keys.dtype)
    return _weighted_step(state, query, key, value, row, gate, far=True)


def aft_conv_init_state(
    batch_size: int,
    embed_dims: int,
    *,
    num_heads: int,
    kernel_size: Sequence[int],
    grid: Sequence[int],
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepState:
    """A buffer as long as the kernel reaches back in raster order, and running sums."""
    size = _conv_size(kernel_size, grid)
    return new_state(batch_size, embed_dims, size, device, dtype, num_heads)


def _conv_size(kernel: Sequence[int], grid: Sequence[int]) -> int:
    checks.check_kernel(kernel, grid)
    reach, stride = 0, 1
    for size, length in zip(reversed(kernel), reversed(grid), strict=True):
        reach += min(size // 2, length - 1) * stride
        stride *= length
    return reach + 1


@torch.no_grad()
def aft_conv_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    grid: Sequence[int],
    global_connectivity: bool = True,
    gate: str = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """One token of causal :func:`aft_conv`; key [B, h], weight [h, *kernel]."""
    _check_position(state, math.prod(grid))
    checks.check_buffer(state.keys.shape[1], _conv_size(weight.shape[1:], grid))
    outside = 0.0 if global_connectivity else -torch.inf

    def row(target: Tensor, source: Tensor) -> Tensor:
        index = kernel_index(target, source, weight.shape[1:], grid)
        bias = weight.flatten(1).T[index.clamp_min(0)]  # [B, n, h]
        return bias.masked_fill((index < 0).unsqueeze(-1), outside)

    return _weighted_step(state, query, key, value, row, gate, far=global_connectivity)


def aft_window_init_state(
    batch_size: int,
    embed_dims: int,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepState:
    """A buffer as long as the hard window reaches back in raster order."""
    return new_state(batch_size, embed_dims, _window_size(window, grid), device, dtype)


def _window_size(window: Window, grid: Sequence[int] | None) -> int:
    checks.check_hard_window(window, grid)
    if grid is None or len(grid) == 1:
        return window if isinstance(window, int) else window[0]
    rows, columns = (half // 2 - 1 for half in as_pair(window))
    return min(rows, grid[0] - 1) * grid[1] + min(columns, grid[1] - 1) + 1


@torch.no_grad()
def aft_window_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    gate: str = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """One token of causal :func:`aft_window`."""
    checks.check_buffer(state.keys.shape[1], _window_size(window, grid))

    def row(target: Tensor, source: Tensor) -> Tensor:
        inside = hard_mask(target, source, window, grid, causal=True)
        return torch.zeros(inside.shape, device=inside.device).masked_fill(~inside, -torch.inf)

    return _weighted_step(state, query, key, value, row, gate, far=False)


aft_local_normalized_init_state = aft_local_init_state


@torch.no_grad()
def aft_local_normalized_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None = None,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    gate: str = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """One token of causal :func:`aft_local_normalized`; pos_u and pos_v as there."""
    checks.check_step(query, key, value, gate, state.keys, state.values)
    _check_position(state, len(pos_u))
    checks.check_buffer(state.keys.shape[1], _local_size(window, grid))
    target = state.position[:, None]
    tokens = slot_tokens(state.position, state.keys.shape[1])
    state = push(state, key, value, keep_sums=True)
    row = _near_row(pos_u, pos_v, window, grid, outside=-torch.inf, dtype=state.keys.dtype)
    bias = row(target, tokens.clamp_min(0)).masked_fill(tokens < 0, -torch.inf)
    near = buffer_sums(state, torch.log_softmax(bias, 1))
    seen = buffer_sums(state, torch.zeros_like(bias))
    shift = torch.maximum(seen.high, state.sums.shift)
    everywhere = seen.denominator * torch.exp(seen.high - shift)
    everywhere += state.sums.denominator * torch.exp(state.sums.shift - shift)
    scale = torch.exp((near.high - shift) + near.rest)
    mixed = (near.numerator * scale / everywhere).squeeze(1)
    return apply_gate(query, mixed, gate, value.dtype), state


def _check_position(state: StepState, tokens: int) -> None:
    # A look at a position on a device would wait for everything before it.
    if state.position.device.type == 'cpu' and (state.position >= tokens).any():
        raise ValueError(f'the state and the position bias hold {tokens} tokens, got one more')
