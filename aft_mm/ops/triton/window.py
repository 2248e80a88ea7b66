"""AFTLocalHard of the Triton backend: how its kernels are launched, and the op."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..geometry import as_pair
from . import window_kernels as kernels
from .blocks import find_block
from .register import differentiated, register
from .rows import Tensors, strided
from .window_kernels import Axis, Block, Walk


class Places(NamedTuple):
    """The grid as (lines, columns); places of the window along each and how many lie ahead."""

    grid: tuple[int, int]
    window: tuple[int, int]
    ahead: tuple[int, int]
    # Columns between the two blocks of a causal window on a grid.
    half: int


def find_places(window: Sequence[int], grid: Sequence[int], causal: bool) -> Places:
    """The window of `geometry.hard_mask`, no larger than the grid."""
    if len(grid) == 1:
        reach = min(window[0], grid[0]) - 1
        ahead = 0 if causal else reach
        return Places((1, grid[0]), (1, reach + 1 + ahead), (0, ahead), 0)
    rows, columns = (min(size // 2, length) for size, length in zip(window, grid, strict=True))
    if causal:
        return Places((grid[0], grid[1]), (rows, columns), (0, 0), columns)
    return Places((grid[0], grid[1]), (2 * rows, 2 * columns), (rows, columns), 0)


def new_sums(value: Tensor, tokens: int) -> Tensor:
    """Room for a sum per token and channel, [3, B, tokens, D]."""
    batch, _, channels = value.shape
    return torch.empty(3, batch, tokens, channels, dtype=torch.float32, device=value.device)


class _Pass(NamedTuple):
    """What all kernels of a pass share: a value for shapes, the places, and what they write."""

    value: Tensor
    places: Places
    results: Tensors
    inputs: Tensors
    result: str
    gate: str

    @property
    def corner(self) -> Axis:
        """Lines of columns among tokens: from the first one, backward from the last one."""
        (lines, width), sign = self.places.grid, -1 if self.result == 'gradients' else 1
        return Axis(lines * width - 1 if sign < 0 else 0, sign * width, sign)

    def walk(self, lines: int, length: int, results: int, window: int, ahead: int) -> Walk:
        return Walk(len(self.value), lines, length, results, window, ahead, self.value.shape[2])

    def launch(self, kernel, lanes: int, *arguments, **options) -> None:
        """The kernel on as many lanes."""
        block = find_block('window', self.value.device)
        channels = triton.cdiv(self.value.shape[2], block.channels)
        programs = triton.cdiv(lanes, block.lanes), channels
        sizes = Block(block.lanes, block.rows, block.channels)
        kernel[programs](*arguments, **options, BLOCK=sizes, num_warps=block.warps)

    def sum_along(
        self, walk: Walk, source: Tensors, axes: tuple[Axis, Axis], sums: Tensor | None, kind: str
    ) -> None:
        """Sums of windows along one axis: into `sums`, or into the results if that is None."""
        ends = strided(new_sums(self.value, walk.lines * walk.length))
        blocks = walk.batch * walk.lines * triton.cdiv(walk.length, walk.window)
        options = dict(KIND=kind, GATE=self.gate)
        self.launch(kernels.ends_of_blocks, blocks, ends, source, walk, axes[0], **options)
        results = self.results if sums is None else Tensors(sums=strided(sums))
        form = kind, self.result if sums is None else 'sums', self.gate
        blocks = walk.batch * walk.lines * triton.cdiv(walk.results + walk.ahead, walk.window)
        arguments = results, self.inputs, source, ends, walk, axes
        self.launch(kernels.sum_windows, blocks, *arguments, FORM=form)

    def run(self) -> None:
        """All kernels of the pass, along the columns and then the rows."""
        (lines, width), window, ahead, half = self.places
        kind = 'targets' if self.result == 'gradients' else 'keys'
        columns = self.walk(lines, width, width + half, window[1], ahead[1])
        if lines == 1 and half == 0:
            self.sum_along(columns, self.inputs, (self.corner, self.corner), None, kind)
            return
        wide = width + half
        across, down = Axis(0, wide, 1), Axis(0, 1, wide)
        sums = new_sums(self.value, lines * wide)
        self.sum_along(columns, self.inputs, (self.corner, across), sums, kind)
        rows = self.walk(wide, lines, lines, window[0], ahead[0])
        source = Tensors(sums=strided(sums))
        if half == 0:
            first, between, step = self.corner
            axes = down, Axis(first, step, between)
            self.sum_along(rows, source, axes, None, 'sums')
            return
        blocks = new_sums(self.value, lines * wide)
        self.sum_along(rows, source, (down, down), blocks, 'sums')
        tokens = self.walk(lines, width, width, 1, 0)
        lanes = len(self.value) * lines * width
        arguments = self.results, self.inputs, strided(blocks), tokens, self.corner, half
        form = kind, self.result, self.gate
        self.launch(kernels.add_right_block, lanes, *arguments, FORM=form)


def hard_window(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    gate: str,
    window: Sequence[int],
    grid: Sequence[int],
    causal: bool,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """AFTLocalHard [B, T, D], and to `save` the sum of each window [3, B, T, D]."""
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    saved = new_sums(value, value.shape[1] if save else 0)
    if len(value):
        results = Tensors(output=strided(output), sums=strided(saved) if save else None)
        inputs = Tensors(*map(strided, (query, key, value, key_mask)))
        places = find_places(window, grid, causal)
        with torch.cuda.device_of(value):
            _Pass(value, places, results, inputs, 'output', gate).run()
    return output, saved


def hard_window_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    gate: str,
    window: Sequence[int],
    grid: Sequence[int],
    causal: bool,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of those of query, key and value that are wanted."""
    results = [
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed else None
        for x, needed in zip((query, key, value), wanted, strict=False)
    ]
    if len(value):
        read = map(strided, (query, key, value, key_mask, gradient))
        inputs = Tensors(*read)._replace(sums=strided(saved))
        written = Tensors(*map(strided, results))
        places = find_places(window, grid, causal)
        with torch.cuda.device_of(value):
            _Pass(value, places, written, inputs, 'gradients', gate).run()
    return [x for x in results if x is not None]


def _empty(query, key, value, key_mask, gate, window, grid, causal, save):
    return value.new_empty(value.shape), new_sums(value, value.shape[1] if save else 0)


window_op = register(hard_window, hard_window_backward, fake=_empty, name='aft_local_hard')


def aft_local_hard(query, key, value, *, window, grid, causal, key_mask, gate) -> Tensor:
    """O(T·D), whatever the window: sums of blocks as long as it."""
    grid = [value.shape[1]] if grid is None else list(grid)
    sizes = list(as_pair(window))[: len(grid)] if isinstance(window, int) else list(window)
    save = differentiated(query, key, value)
    return window_op(query, key, value, key_mask, gate, sizes, grid, causal, save)[0]
