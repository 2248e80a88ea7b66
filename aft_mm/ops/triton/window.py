"""AFT-local-hard: ``y_t = g(q_t) n_t / d_t``, n and d the sums of e^k v and e^k in a window.

Sums over intervals of `window` places come from blocks of the same length (van Herk): an interval
is the end of one block and the beginning of the next. A first kernel writes the sum from each place
to the end of its block; a second one sums each block from its beginning and adds the end of the
block before. That takes two additions per place for any window, and no subtraction. On a grid it is
done along the columns, then along the rows. The right block of a causal window on a grid is the
left block of the row above, moved right; a last kernel adds it, so sums continue past the right
border.

A lane walks along one block, so threads do not communicate. In the backward pass the same kernels
sum the targets that see a token: counted from the other end, those are its window.
"""

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..geometry import as_pair
from .block_sizes import cdiv, find_block
from .online_softmax import (
    LOWEST,
    Tensors,
    empty_sum,
    gated_mean,
    gradients_of_token,
    load_entry,
    load_sum,
    merge,
    new_sums,
    new_wanted,
    store_entry,
    store_sum,
    strided,
    target_of_token,
)
from .torch_ops import TOKENS, differentiated, register


class Axis(NamedTuple):
    """Token of a place: first + line · between + place · step."""

    first: int
    between: int
    step: int


class Walk(NamedTuple):
    """`lines` of `length` places, processed in blocks of `window`.

    A line has `results` results, each the sum of the `window` places that end `ahead` of its own.
    """

    batch: int
    lines: int
    length: int
    results: int
    window: int
    ahead: int
    channels: int


@triton.jit
def find_lanes(walk, blocks, BLOCK: tl.constexpr):
    """Return sequence, line and first place of each lane, its channels, and which exist."""
    lane = tl.program_id(0).to(tl.int64) * BLOCK.lanes + tl.arange(0, BLOCK.lanes)[:, None]
    channel = tl.program_id(1) * BLOCK.channels + tl.arange(0, BLOCK.channels)[None, :]
    batch = lane // blocks // walk.lines
    real = (batch < walk.batch) & (channel < walk.channels)
    return batch, lane // blocks % walk.lines, lane % blocks * walk.window, channel, real


@triton.jit
def load_tokens(tensors, batch, token, channel, real):
    """Load keys and values, −inf and 0 where hidden or outside."""
    if tensors.key_mask is not None:
        at = tensors.key_mask[0] + batch * tensors.key_mask[1] + token * tensors.key_mask[2]
        real &= tl.load(at + 0 * channel, mask=real, other=0) != 0
    key = load_entry(tensors.key, batch, token, channel, real, float('-inf'))
    return key, load_entry(tensors.value, batch, token, channel, real)


@triton.jit
def load_target(tensors, batch, token, channel, real, GATE: tl.constexpr):
    """Return the gradient of a query, and the sum that its target contributes to its keys."""
    seen = load_sum(tensors.sums, batch, token, channel, real, LOWEST)
    gradient = load_entry(tensors.gradient, batch, token, channel, real)
    query = gradient
    if GATE != 'none':
        query = load_entry(tensors.query, batch, token, channel, real)
    return target_of_token(gradient, query, *seen, 'softmax', GATE)


@triton.jit
def load_place(source, walk, axis, where, place, real, KIND: tl.constexpr, GATE: tl.constexpr):
    """Return the sum at a place: that of a key, of a target, or one that another kernel wrote."""
    batch, line, channel = where
    real &= (place >= 0) & (place < walk.length)
    token = axis.first + line * axis.between + place * axis.step
    if KIND == 'keys':
        high, first = load_tokens(source, batch, token, channel, real)
        second = tl.where(real, 1.0, 0.0)
    elif KIND == 'targets':
        _, high, first, second = load_target(source, batch, token, channel, real, GATE)
        high = tl.where(real, high, LOWEST)
    else:
        high, first, second = load_sum(source.sums, batch, token, channel, real, LOWEST)
    return high, first, second


@triton.jit
def finish(results, inputs, where, real, found, RESULT: tl.constexpr, GATE: tl.constexpr):
    """Write the sum of a window, or the output or the gradients that follow from it."""
    if RESULT == 'output':
        query = found[1]
        if GATE != 'none':
            query = load_entry(inputs.query, *where, real)
        mixed = gated_mean(query, found[1], found[2], 'softmax', GATE)
        store_entry(results.output, *where, real, mixed)
    if RESULT == 'gradients':
        key, value = load_tokens(inputs, *where, real)
        grad_key, grad_value = gradients_of_token(key, value, *found, 'softmax')
        store_entry(results.key, *where, real, grad_key)
        store_entry(results.value, *where, real, grad_value)
        if results.query is not None:
            grad_query, _, _, _ = load_target(inputs, *where, real, GATE)
            store_entry(results.query, *where, real, grad_query)
    else:
        store_sum(results.sums, *where, real, *found)


@triton.jit
def ends_of_blocks(
    ends, source, walk, axis, KIND: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the sum from each place to the end of its block into ends [3, B, lines · length, D]."""
    ROWS: tl.constexpr = BLOCK.rows
    blocks = tl.cdiv(walk.length, walk.window)
    batch, line, start, channel, lanes = find_lanes(walk, blocks, BLOCK)
    high, first, second = empty_sum(BLOCK.lanes, BLOCK.channels)
    offset = tl.zeros([], tl.int64) + walk.window - 1
    while offset >= 0:
        loaded = ()
        for r in tl.static_range(ROWS):
            real = lanes & (offset >= r)
            where = batch, line, channel
            one = load_place(source, walk, axis, where, start + offset - r, real, KIND, GATE)
            loaded = loaded + (one,)
        for r in tl.static_range(ROWS):
            high, first, second = merge(high, first, second, *loaded[r])
            place = start + offset - r
            real = lanes & (offset >= r) & (place < walk.length)
            token = line * walk.length + place
            store_sum(ends, batch, token, channel, real, high, first, second)
        offset -= ROWS


@triton.jit
def sum_windows(results, inputs, source, ends, walk, axes, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the sum of each window, and :func:`finish` it."""
    KIND: tl.constexpr = FORM[0]
    RESULT: tl.constexpr = FORM[1]
    GATE: tl.constexpr = FORM[2]
    ROWS: tl.constexpr = BLOCK.rows
    blocks = tl.cdiv(walk.results + walk.ahead, walk.window)
    batch, line, start, channel, lanes = find_lanes(walk, blocks, BLOCK)
    high, first, second = empty_sum(BLOCK.lanes, BLOCK.channels)
    offset = tl.zeros([], tl.int64)
    while offset < walk.window:
        loaded, before = (), ()
        for r in tl.static_range(ROWS):
            where, place = (batch, line, channel), start + offset + r
            inside = lanes & (offset + r < walk.window)
            one = load_place(source, walk, axes[0], where, place, inside, KIND, GATE)
            loaded = loaded + (one,)
            # The window of the last place of a block is the whole block.
            place = place - walk.window + 1
            real = inside & (offset + r < walk.window - 1) & (place >= 0) & (place < walk.length)
            one = load_sum(ends, batch, line * walk.length + place, channel, real, LOWEST)
            before = before + (one,)
        for r in tl.static_range(ROWS):
            high, first, second = merge(high, first, second, *loaded[r])
            found = merge(high, first, second, *before[r])
            place = start + offset + r - walk.ahead
            real = lanes & (offset + r < walk.window) & (place >= 0) & (place < walk.results)
            token = axes[1].first + line * axes[1].between + place * axes[1].step
            finish(results, inputs, (batch, token, channel), real, found, RESULT, GATE)
        offset += ROWS


@triton.jit
def add_right_block(
    results, inputs, sums, walk, axis, half, FORM: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the left block of the row above, `half` columns right, and :func:`finish`."""
    RESULT: tl.constexpr = FORM[1]
    GATE: tl.constexpr = FORM[2]
    batch, line, place, channel, real = find_lanes(walk, walk.length, BLOCK)
    width = walk.length + half
    found = load_sum(sums, batch, line * width + place, channel, real, LOWEST)
    above = (line - 1) * width + place + half
    right = load_sum(sums, batch, above, channel, real & (line > 0), LOWEST)
    found = merge(*found, *right)
    token = axis.first + line * axis.between + place * axis.step
    finish(results, inputs, (batch, token, channel), real, found, RESULT, GATE)


def find_places(window: Sequence[int], grid: Sequence[int], causal: bool) -> tuple:
    """Return the window of `geometry.hard_mask`, limited to the grid.

    Returns:
        The grid as (lines, columns), along each the places of the window and those ahead, and the
        columns between the two blocks of a causal window on a grid, else 0.
    """
    if len(grid) == 1:
        reach = min(window[0], grid[0]) - 1
        ahead = 0 if causal else reach
        return (1, grid[0]), (1, reach + 1 + ahead), (0, ahead), 0
    rows, columns = (min(size // 2, length) for size, length in zip(window, grid, strict=True))
    if causal:
        return tuple(grid), (rows, columns), (0, 0), columns
    return tuple(grid), (2 * rows, 2 * columns), (rows, columns), 0


class _Pass(NamedTuple):
    """Data that the kernels of a pass share: a value for shapes, the places, inputs and results."""

    value: Tensor
    places: tuple
    results: Tensors
    inputs: Tensors
    kind: str
    result: str
    gate: str

    def walk(self, lines: int, length: int, results: int, window: int, ahead: int) -> Walk:
        return Walk(len(self.value), lines, length, results, window, ahead, self.value.shape[2])

    def launch(self, kernel, lanes: int, *arguments, **options) -> None:
        block = find_block('window', self.value.device)
        programs = cdiv(lanes, block.lanes), cdiv(self.value.shape[2], block.channels)
        kernel[programs](*arguments, **options, BLOCK=block, num_warps=block.warps)

    def sum_along(
        self, walk: Walk, source: Tensors, axes: tuple[Axis, Axis], sums: Tensor | None, kind: str
    ) -> None:
        """Sum windows along one axis into `sums`, or into the results if that is None."""
        ends = strided(new_sums(self.value, walk.lines * walk.length))
        lines = walk.batch * walk.lines
        lanes = lines * cdiv(walk.length, walk.window)
        options = dict(KIND=kind, GATE=self.gate)
        self.launch(ends_of_blocks, lanes, ends, source, walk, axes[0], **options)
        results = self.results if sums is None else Tensors(sums=strided(sums))
        form = kind, self.result if sums is None else 'sums', self.gate
        lanes = lines * cdiv(walk.results + walk.ahead, walk.window)
        self.launch(sum_windows, lanes, results, self.inputs, source, ends, walk, axes, FORM=form)

    def run(self) -> None:
        (lines, width), window, ahead, half = self.places
        # The columns from the first token on, or in the backward pass from the last one.
        corner = Axis(0, width, 1)
        if self.result == 'gradients':
            corner = Axis(lines * width - 1, -width, -1)
        columns = self.walk(lines, width, width + half, window[1], ahead[1])
        if lines == 1 and half == 0:
            self.sum_along(columns, self.inputs, (corner, corner), None, self.kind)
            return
        wide = width + half
        across, down = Axis(0, wide, 1), Axis(0, 1, wide)
        sums = new_sums(self.value, lines * wide)
        self.sum_along(columns, self.inputs, (corner, across), sums, self.kind)
        rows = self.walk(wide, lines, lines, window[0], ahead[0])
        source = Tensors(sums=strided(sums))
        if half == 0:
            axes = down, Axis(corner.first, corner.step, corner.between)
            self.sum_along(rows, source, axes, None, 'sums')
            return
        blocks = new_sums(self.value, lines * wide)
        self.sum_along(rows, source, (down, down), blocks, 'sums')
        tokens = self.walk(lines, width, width, 1, 0)
        arguments = self.results, self.inputs, strided(blocks), tokens, corner, half
        form = self.kind, self.result, self.gate
        self.launch(add_right_block, len(self.value) * lines * width, *arguments, FORM=form)


def new_results(value: Tensor, save: bool) -> tuple[Tensor, Tensor]:
    """Return room for the output, and with `save` for the sum of each window."""
    return value.new_empty(value.shape), new_sums(value, value.shape[1] if save else 0)


def hard_window(query, key, value, key_mask, gate, window, grid, causal, save):
    """Return AFT-local-hard [B, T, D], and with `save` the sum of each window [3, B, T, D]."""
    output, saved = new_results(value, save)
    results = Tensors(output=strided(output), sums=strided(saved) if save else None)
    inputs = Tensors(*map(strided, (query, key, value, key_mask)))
    places = find_places(window, grid, causal)
    _Pass(value, places, results, inputs, 'keys', 'output', gate).run()
    return output, saved


def hard_window_backward(
    gradient, saved, query, key, value, key_mask, gate, window, grid, causal, wanted
) -> list[Tensor | None]:
    results = new_wanted((query, key, value), wanted)
    read, written = (query, key, value, key_mask, gradient), Tensors(*map(strided, results))
    inputs = Tensors(*map(strided, read))._replace(sums=strided(saved))
    places = find_places(window, grid, causal)
    _Pass(value, places, written, inputs, 'targets', 'gradients', gate).run()
    return results


window_op = register(
    hard_window,
    f'{TOKENS}, Tensor? key_mask, str gate, SymInt[] window, SymInt[] grid, bool causal',
    hard_window_backward,
    fake=lambda *inputs: new_results(inputs[2], inputs[-1]),
    public_name='aft_local_hard',
)


def aft_local_hard(query, key, value, *, window, grid, causal, key_mask, gate) -> Tensor:
    """Compute AFT-local-hard in O(T·D) for any window."""
    grid = [value.shape[1]] if grid is None else list(grid)
    sizes = list(as_pair(window))[: len(grid)] if isinstance(window, int) else list(window)
    save = differentiated(query, key, value)
    return window_op(query, key, value, key_mask, gate, sizes, grid, causal, save)[0]
