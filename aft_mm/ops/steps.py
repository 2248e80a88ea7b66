"""Causal ops one token at a time: ``NAME_init_state`` makes a state, ``NAME_step`` adds a token.

Steps return the rows of the parallel causal op. query, key, value are [B, D] (key [B, h] for
aft_conv, query None with ``gate='none'``), outputs [B, D]. :func:`aft_mm.ops.prefill` takes whole
prompts. docs/mixers.md has the cost of a step and the size of the state.

States are float32 (or `dtype`) and updated in place: the previous one must not be used again. Steps
have no gradient and never synchronise, so a CUDA graph can capture them. A token past the last
position raises ValueError on a CPU; elsewhere torch handles the index.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aft_mm.checks import check_choice, check_flag, check_sizes, per_dimension

from . import checks
from .dispatch import implementation
from .gates import Gate, in_kernels
from .geometry import Window, as_pair, kernel_reach, near_radius
from .online_softmax import ShiftedSum, apply_gate
from .state import StepState, check_kind, check_state, new_state, use_up


def _run(
    op: str,
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *others: Tensor | None,
    **options: Any,
) -> tuple[Tensor, StepState]:
    gate = options['gate']
    checks.check_step(query, key, value, gate, state.keys, state.values)
    if not in_kernels(gate):
        mixed, state = _run(op, state, None, key, value, *others, **{**options, 'gate': 'none'})
        wide = mixed.to(torch.promote_types(value.dtype, torch.float32))
        return apply_gate(query, wide, gate, value.dtype), state
    tensors = (query, key, value, *others)
    _, run = implementation(op, (*tensors, *state.sums, state.values, state.keys), options)
    result: tuple[Tensor, StepState] = run(state, *tensors, **options)
    use_up(state.position)
    return result


def aft_simple_init_state(
    batch_size: int,
    embed_dims: int,
    *,
    key_function: str = 'softmax',
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepState:
    """Return empty running sums, [B, 1, D] each, or [B, 1, 2·D] for the two terms of relu2."""
    check_choice('key_function', key_function, checks.KEY_FUNCTIONS)
    state = new_state(batch_size, embed_dims, 0, device, dtype)
    if key_function == 'relu2':
        state = state._replace(
            sums=ShiftedSum(*(torch.cat((part, part), -1) for part in state.sums))
        )
    return state


@torch.no_grad()
def aft_simple_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    key_function: str = 'softmax',
    gate: Gate = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """Compute one token of causal :func:`aft_simple`: y [B, D] and the next state."""
    check_state(state)
    checks.check_key_function(key_function, gate)
    checks.check_terms(state.sums.numerator, state.values, key_function)
    checks.check_buffer(state.keys.shape[1], 0)
    options = dict(key_function=key_function, gate=gate)
    return _run('aft_simple_step', state, query, key, value, **options)


def aft_decay_init_state(
    batch_size: int,
    embed_dims: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepState:
    """Return empty running sums, [B, 1, D] each."""
    return new_state(batch_size, embed_dims, 0, device, dtype)


@torch.no_grad()
def aft_decay_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    *,
    gate: Gate = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """Compute one token of causal :func:`aft_decay`: y [B, D] and the next state."""
    check_state(state)
    checks.check_decay(decay, state.values)
    checks.check_terms(state.sums.numerator, state.values, 'softmax')
    checks.check_buffer(state.keys.shape[1], 0)
    return _run('aft_decay_step', state, query, key, value, decay, gate=gate)


def aft_full_init_state(
    batch_size: int,
    embed_dims: int,
    num_tokens: int,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepState:
    """Return a buffer for the keys and values of all `num_tokens`."""
    return new_state(batch_size, embed_dims, num_tokens, device, dtype)


@torch.no_grad()
def aft_full_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    position_bias: Tensor,
    *,
    gate: Gate = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """Compute one token of causal :func:`aft_full`; position_bias is w [T, T]."""
    tokens = check_kind(state).keys.shape[1]
    checks.check_tensor('position_bias', position_bias, state.keys)
    if position_bias.dim() != 2 or len(position_bias) != position_bias.shape[1]:
        raise ValueError(f'position_bias must be [T, T], got {list(position_bias.shape)}')
    check_state(state, min(tokens, len(position_bias)))
    return _run('aft_full_step', state, query, key, value, position_bias, gate=gate)


def aft_local_init_state(
    batch_size: int,
    embed_dims: int,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepState:
    """Return a buffer as long as the window reaches back in raster order, and running sums."""
    return new_state(batch_size, embed_dims, _local_size(window, grid), device, dtype)


def _local_size(window: Window, grid: Sequence[int] | None) -> int:
    if grid is not None:
        check_sizes('grid', grid, (1, 2))
    checks.check_window(window, grid)
    return max(near_radius(window, grid), 0) + 1


def _check_local(
    state: StepState,
    pos_u: Tensor,
    pos_v: Tensor | None,
    window: Window,
    grid: Sequence[int] | None,
) -> None:
    check_kind(state)
    checks.check_tensor('pos_u', pos_u, state.keys)
    check_state(state, len(pos_u) if pos_u.dim() else 0)
    checks.check_buffer(state.keys.shape[1], _local_size(window, grid))
    if pos_v is None:
        checks.check_free_bias(pos_u, len(pos_u), window, grid, causal=True)
    else:
        checks.check_tensor('pos_v', pos_v, state.keys)
        checks.check_factors(pos_u, pos_v, len(pos_u), len(pos_u))


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
    gate: Gate = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """Compute one token of causal :func:`aft_local`, with the pos_u and pos_v of all tokens."""
    _check_local(state, pos_u, pos_v, window, grid)
    options = dict(window=window, grid=grid, gate=gate)
    return _run('aft_local_step', state, query, key, value, pos_u, pos_v, **options)


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
    """Return a buffer as long as the kernel reaches back in raster order, and running sums."""
    check_sizes('grid', grid, (1, 2, 3))
    kernel_size = per_dimension('kernel_size', kernel_size, len(grid))
    checks.check_num_heads(num_heads, embed_dims)
    size = _conv_size(kernel_size, grid)
    return new_state(batch_size, embed_dims, size, device, dtype, num_heads)


def _conv_size(kernel: Sequence[int], grid: Sequence[int]) -> int:
    checks.check_grid(grid, kernel=kernel)
    return kernel_reach(kernel, grid) + 1


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
    gate: Gate = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """Compute one token of causal :func:`aft_conv`; key [B, h], weight ``[h, *kernel]``."""
    check_kind(state)
    checks.check_tensor('weight', weight, state.keys)
    check_flag('global_connectivity', global_connectivity)
    check_sizes('grid', grid, (1, 2, 3))
    check_state(state, math.prod(grid))
    checks.check_buffer(state.keys.shape[1], _conv_size(weight.shape[1:], grid))
    options = dict(grid=grid, global_connectivity=global_connectivity, gate=gate)
    return _run('aft_conv_step', state, query, key, value, weight, **options)


def aft_local_hard_init_state(
    batch_size: int,
    embed_dims: int,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> StepState:
    """Return a buffer as long as the hard window reaches back in raster order."""
    return new_state(batch_size, embed_dims, _window_size(window, grid), device, dtype)


def _window_size(window: Window, grid: Sequence[int] | None) -> int:
    if grid is not None:
        check_sizes('grid', grid, (1, 2))
    checks.check_hard_window(window, grid)
    if grid is None or len(grid) == 1:
        return window if isinstance(window, int) else window[0]
    rows, columns = (size // 2 for size in as_pair(window))
    left = min(rows - 1, grid[0] - 1) * grid[1] + min(columns - 1, grid[1] - 1)
    right = min(rows, grid[0] - 1) * grid[1] - 1  # at most left on a grid without this block
    return max(left, right) + 1


@torch.no_grad()
def aft_local_hard_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    gate: Gate = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """Compute one token of causal :func:`aft_local_hard`."""
    size = _window_size(window, grid)
    check_state(state, None if grid is None else math.prod(grid))
    checks.check_buffer(state.keys.shape[1], size)
    options = dict(window=window, grid=grid, gate=gate)
    return _run('aft_local_hard_step', state, query, key, value, **options)


aft_local_learned_init_state = aft_local_init_state


@torch.no_grad()
def aft_local_learned_step(
    state: StepState,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    pos_u: Tensor,
    pos_v: Tensor | None = None,
    *,
    window: Window,
    grid: Sequence[int] | None = None,
    gate: Gate = 'sigmoid',
) -> tuple[Tensor, StepState]:
    """Compute one token of causal :func:`aft_local_learned`; pos_u and pos_v as in the op."""
    _check_local(state, pos_u, pos_v, window, grid)
    options = dict(window=window, grid=grid, gate=gate)
    return _run('aft_local_learned_step', state, query, key, value, pos_u, pos_v, **options)
