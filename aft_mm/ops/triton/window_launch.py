"""How a grid is cut into tiles, and the launches of AFTWindow."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import window_kernels as kernels
from .common import product_precision, strided, term_dtype

# Tokens of a tile, along a line of the grid. A narrow line would leave a wide one half empty.
TILE = 64
NARROW_TILE = 32
# Channels of a program and its warps: 64 × 64 numbers in 4 float32 sums leave room for one program
# per multiprocessor, 64 × 32 of 2-byte inputs for two, which hide each other's loads.
CHANNELS = 32
WARPS = 8


class Box(NamedTuple):
    """Lines `top` … `bottom` and columns `left` … `right` away from the target."""

    top: int
    bottom: int
    left: int
    right: int

    def reflected(self) -> 'Box':
        """The targets that have a token in their box, seen from the token."""
        return Box(-self.bottom, -self.top, -self.right, -self.left)


class Places(NamedTuple):
    """The grid as (lines, columns); the window as a box and, causal in 2-d, a second one."""

    grid: tuple[int, int]
    box: Box
    second_box: Box | None

    def reflected(self) -> 'Places':
        """The targets that see a token."""
        second_box = None if self.second_box is None else self.second_box.reflected()
        return Places(self.grid, self.box.reflected(), second_box)


def find_places(window: Sequence[int], grid: Sequence[int], causal: bool) -> Places:
    """The window of `geometry.hard_mask` as boxes; a sequence is a grid of one line."""
    if len(grid) == 1:
        reach = min(window[0], grid[0]) - 1
        return Places((1, grid[0]), Box(0, 0, -reach, 0 if causal else reach), None)
    lines, columns = (min(size // 2, length) for size, length in zip(window, grid, strict=True))
    shape = grid[0], grid[1]
    if causal:
        return Places(shape, Box(1 - lines, 0, 1 - columns, 0), Box(-lines, -1, 1, columns))
    return Places(shape, Box(1 - lines, lines, 1 - columns, columns), None)


def choose_tile(places: Places) -> int:
    """Tokens of a tile."""
    return TILE if places.grid[1] > NARROW_TILE else NARROW_TILE


def _make_pair(value: Tensor, places: Places, save: bool) -> tuple[Tensor, Tensor | None]:
    """Room for the pair [2, B, T, D], and on one line for the sums of tiles that are seen whole."""
    dtype = term_dtype(value.dtype, save)
    pair = torch.empty((2, *value.shape), dtype=dtype, device=value.device)
    tile, box = choose_tile(places), places.box
    if places.grid[0] > 1 or box.right - box.left + 1 < 2 * tile:
        return pair, None
    shape = 2, len(value), triton.cdiv(value.shape[1], tile), value.shape[2]
    return pair, torch.empty(shape, dtype=torch.float32, device=value.device)


def make_saved(value: Tensor, save: bool) -> Tensor:
    """Room for (o, d) [2, B, T, D], no token unless to `save`."""
    batch, tokens, channels = value.shape
    shape = 2, batch, tokens if save else 0, channels
    return torch.empty(shape, dtype=torch.float32, device=value.device)


def _first_kernel(value: Tensor, places: Places) -> tuple[tuple[int, int], dict]:
    """Programs and settings of the kernel that forms the pair, along all tokens."""
    batch, tokens, channels = value.shape
    tile = choose_tile(places)
    programs = batch * triton.cdiv(tokens, tile), triton.cdiv(channels, CHANNELS)
    blocks = dict(TILE=tile, CHANNELS=CHANNELS, num_warps=WARPS)
    return programs, dict(tokens=tokens, channels=channels, **blocks)


def _second_kernel(value: Tensor, places: Places) -> tuple[tuple[int, int], dict]:
    """Programs and settings of the kernel that sums the pair, line by line."""
    batch, _, channels = value.shape
    (lines, width), box, second_box = places
    tile = choose_tile(places)
    programs = batch * lines * triton.cdiv(width, tile), triton.cdiv(channels, CHANNELS)
    return programs, dict(
        channels=channels,
        lines=lines,
        width=width,
        **box._asdict(),
        # What is passed without a second box is not read.
        **{f'second_{side}': at for side, at in (second_box or box)._asdict().items()},
        SECOND_BOX=second_box is not None,
        PRECISION=product_precision(value.dtype),
        TILE=tile,
        CHANNELS=CHANNELS,
        num_warps=WARPS,
    )


def window_forward(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    shift: Tensor,
    gate: str,
    places: Places,
    save: bool,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, D] and, to `save` for the gradient, (o, d) [2, B, T, D]."""
    output = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    saved = make_saved(value, save)
    if len(value) == 0:
        return output, saved
    pair, sums = map(strided, _make_pair(value, places, save))
    inputs = [strided(x) for x in (key, value, key_mask, shift)]
    with torch.cuda.device_of(value):
        programs, settings = _first_kernel(value, places)
        kernels.weigh[programs](pair, sums, *inputs, **settings)
        programs, settings = _second_kernel(value, places)
        kernels.window_mean[programs](
            strided(output),
            strided(saved if save else None),
            pair,
            sums,
            strided(query),
            GATE=gate,
            **settings,
        )
    return output, saved


def window_backward(
    gradient: Tensor,
    saved: Tensor,
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    shift: Tensor,
    gate: str,
    places: Places,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of query, key and value."""
    results = [
        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for x in (query, key, value)
    ]
    if len(value) == 0:
        return tuple(results)
    by_query, by_key, by_value = map(strided, results)
    reflected = places.reflected()
    pair, sums = map(strided, _make_pair(value, reflected, save=True))
    inputs = [strided(x) for x in (key, value, key_mask, shift)]
    with torch.cuda.device_of(value):
        programs, settings = _first_kernel(value, reflected)
        kernels.weigh_gradient[programs](
            pair,
            sums,
            by_query,
            strided(saved),
            strided(gradient),
            strided(query),
            GATE=gate,
            **settings,
        )
        programs, settings = _second_kernel(value, reflected)
        kernels.window_gradient[programs](by_key, by_value, pair, sums, *inputs, **settings)
    return tuple(results)
