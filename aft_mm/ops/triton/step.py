"""Decoding steps of the Triton backend: what each op's bias is, the launches, and two ops."""

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ..geometry import Window, as_pair
from ..state import StepState
from . import step_kernels as kernels
from .blocks import BufferStepBlock, find_block
from .register import register
from .rows import strided
from .step_kernels import Bias, Block, Form, State, Token

# A sequence is a grid of one row; and where there is no table, any token is known.
ENDLESS = 2**31 - 1
STATE = ('shift', 'numerator', 'denominator', 'keys', 'values')


def _as_token(x: Tensor | None) -> tuple | None:
    """x [B, C] as kernels take [B, 1, C]."""
    return None if x is None else (x, x.stride(0), 0, x.stride(1))


def _new_results(value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the output [B, D] and the next position [B]."""
    return value.new_empty(value.shape), position.new_empty(position.shape)


def _bundle(sums, position, query, key, value, *buffer) -> tuple[State, Token, tuple]:
    """What kernels take, and the results in it."""
    results = _new_results(value, position)
    state = State(*map(strided, (*sums, position, results[1], *buffer)))
    return state, Token(*map(_as_token, (results[0], query, key, value))), results


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
    sums, (batch, channels) = (shift, numerator, denominator), value.shape
    state, token, results = _bundle(sums, position, query, key, value)
    block = find_block('simple_step', value.device)
    programs = batch * triton.cdiv(channels, block.channels)
    if programs:
        with torch.cuda.device_of(value):
            kernels.simple_step[(programs,)](
                state, token, channels, GATE=gate, CHANNELS=block.channels, num_warps=block.warps
            )
    return results


def find_sizes(block: BufferStepBlock, size: int, per_head: int) -> Block:
    """The tile for a buffer of `size` tokens and heads of `per_head` channels."""
    rows = min(max(triton.next_power_of_2(size), block.least_rows), block.most_rows)
    width = min(triton.next_power_of_2(per_head), block.channels)
    return Block(rows, block.channels // width, width, per_head, block.rank)


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
    sums = shift, numerator, denominator
    state, token, results = _bundle(sums, position, query, key, value, keys, values)
    batch, heads = key.shape
    if batch == 0:
        return results
    block = find_block('buffer_step', keys.device)
    sizes = find_sizes(block, keys.shape[1], value.shape[1] // heads)
    limit = len(bias) if kind in ('full', 'free', 'factors') else ENDLESS
    rank = 0 if pos_v is None else pos_v.shape[1]
    with torch.cuda.device_of(value):
        kernels.buffer_step[(batch * triton.cdiv(heads, sizes.heads),)](
            state,
            token,
            Bias(strided(bias), strided(pos_v), rank, limit),
            heads,
            keys.shape[1],
            FORM=Form(kind, tuple(places), far, gate),
            BLOCK=sizes,
            num_warps=block.warps,
            maxnreg=block.registers,
        )
    return results


def _empty_simple(shift, numerator, denominator, position, query, key, value, gate):
    return _new_results(value, position)


def _empty_buffer(shift, numerator, denominator, keys, values, position, query, key, value, *bias):
    return _new_results(value, position)


simple_op = register(simple_step, fake=_empty_simple, mutates=STATE[:3])
buffer_op = register(buffer_step, fake=_empty_buffer, mutates=STATE)


def aft_simple_step(state, query, key, value, *, key_function, gate) -> tuple[Tensor, StepState]:
    """O(D): the token joins the running sums."""
    output, position = simple_op(*state.sums, state.position, query, key, value, gate)
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
    output, position = buffer_op(
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


def aft_local_hard_step(
    state, query, key, value, *, window, grid, gate
) -> tuple[Tensor, StepState]:
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
