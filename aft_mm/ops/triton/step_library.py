"""Decoding steps of the Triton backend: what each op's bias is, and two opaque nodes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..geometry import Window, as_pair
from ..state import StepState
from . import step_launch as launch

# A sequence is a grid of one row.
ENDLESS = 2**31 - 1
STATE = ('shift', 'numerator', 'denominator', 'keys', 'values')


@torch.library.custom_op('aft_mm::simple_step', mutates_args=STATE[:3])
def simple_step(
    shift: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    position: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    gate: str,
) -> tuple[Tensor, Tensor]:
    """A step of AFT-simple: output [B, D], next position [B]."""
    sums = shift, numerator, denominator
    return launch.simple_step(sums, position, query, key, value, gate)


@torch.library.custom_op('aft_mm::buffer_step', mutates_args=STATE)
def buffer_step(
    shift: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    pos_v: Tensor | None,
    kind: str,
    places: Sequence[int],
    far: bool,
    gate: str,
) -> tuple[Tensor, Tensor]:
    """A step of an op with a buffer: output [B, D], next position [B]."""
    state = (shift, numerator, denominator), keys, values, position
    return launch.buffer_step(*state, query, key, value, bias, pos_v, kind, places, far, gate)


@simple_step.register_fake
def _(shift, numerator, denominator, position, query, key, value, gate):
    return value.new_empty(value.shape), position.new_empty(position.shape)


@buffer_step.register_fake
def _(shift, numerator, denominator, keys, values, position, query, key, value, *others):
    return value.new_empty(value.shape), position.new_empty(position.shape)


def aft_simple_step(state, query, key, value, *, key_function, gate) -> tuple[Tensor, StepState]:
    """O(D): the token joins the running sums."""
    output, position = simple_step(*state.sums, state.position, query, key, value, gate)
    return output, state._replace(position=position)


def _step(
    state: StepState,
    tokens: Sequence[Tensor | None],
    kind: str,
    places: Sequence[int],
    far: bool,
    gate: str,
    bias: Tensor | None = None,
    pos_v: Tensor | None = None,
) -> tuple[Tensor, StepState]:
    sums, keys, values, position = state
    output, position = buffer_step(
        *sums, keys, values, position, *tokens, bias, pos_v, kind, places, far, gate
    )
    return output, state._replace(position=position)


def aft_full_step(state, query, key, value, position_bias, *, gate) -> tuple[Tensor, StepState]:
    """O(T·D): the row of w weighs every token so far."""
    return _step(state, (query, key, value), 'full', (), False, gate, position_bias)


def aft_local_step(
    state, query, key, value, pos_u, pos_v, *, window, grid, gate
) -> tuple[Tensor, StepState]:
    """O(r·D): the row of w over the buffer, and the sums of what left it."""
    kind = 'free' if pos_v is None else 'factors'
    places = _near_places(window, grid)
    return _step(state, (query, key, value), kind, places, True, gate, pos_u, pos_v)


def aft_window_step(state, query, key, value, *, window, grid, gate) -> tuple[Tensor, StepState]:
    """O(r·D): the buffer holds the window."""
    width, rows, columns = _near_places(window, grid)
    halves = (rows, columns) if width == ENDLESS else (rows // 2, columns // 2)
    return _step(state, (query, key, value), 'window', (width, *halves), False, gate)


def aft_conv_step(
    state, query, key, value, weight, *, grid, global_connectivity, gate
) -> tuple[Tensor, StepState]:
    """O(r·D): the kernel over the buffer, and the sums of what left it if W = 1 there."""
    kernel, ones = weight.shape[1:], (1,) * (3 - len(grid))
    places = (*ones, *grid, *ones, *kernel)
    tokens = query, key, value
    return _step(state, tokens, 'conv', places, global_connectivity, gate, weight.flatten(1))


def _near_places(window: Window, grid: Sequence[int] | None) -> tuple[int, int, int]:
    """Width of the grid, rows and columns of the window."""
    if grid is None or len(grid) == 1:
        return ENDLESS, 1, window if isinstance(window, int) else window[0]
    return grid[1], *as_pair(window)
