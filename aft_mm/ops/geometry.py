import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Window = int | Sequence[int]


def as_pair(window: Window) -> tuple[int, int]:
    return (window, window) if isinstance(window, int) else (window[0], window[1])


def near_mask(target: Tensor, source: Tensor, window: Window, grid: Sequence[int] | None) -> Tensor:
    """Return where ``|Δt| < s``, on a 2-d grid ``|Δrow| < s_r and |Δcol| < s_c`` (eq. 4)."""
    if grid is None or len(grid) == 1:
        size = window if isinstance(window, int) else window[0]
        return (target - source).abs() < size
    rows, columns = as_pair(window)
    width = grid[1]
    return ((target // width - source // width).abs() < rows) & (
        (target % width - source % width).abs() < columns
    )


def near_radius(window: Window, grid: Sequence[int] | None) -> int:
    """Return the largest ``|t − t'|`` inside the window of :func:`near_mask`; −1 if empty."""
    if grid is None or len(grid) == 1:
        return (window if isinstance(window, int) else window[0]) - 1
    rows, columns = as_pair(window)
    rows, columns = min(rows, grid[0]), min(columns, grid[1])
    return -1 if 0 in (rows, columns) else (rows - 1) * grid[1] + columns - 1


def hard_mask(
    target: Tensor, source: Tensor, window: Window, grid: Sequence[int] | None, causal: bool
) -> Tensor:
    if grid is None or len(grid) == 1:
        size = window if isinstance(window, int) else window[0]
        distance = target - source
        return (distance >= 0) & (distance < size) if causal else distance.abs() < size
    half_rows, half_columns = (size // 2 for size in as_pair(window))
    width = grid[1]
    down = source // width - target // width
    right = source % width - target % width
    inside = (right > -half_columns) & (right <= half_columns)
    if causal:
        down = torch.where(right > 0, down + 1, down)  # the right block is one row higher
        return inside & (down > -half_rows) & (down <= 0)
    return inside & (down > -half_rows) & (down <= half_rows)


def kernel_index(
    target: Tensor, source: Tensor, kernel: Sequence[int], grid: Sequence[int]
) -> Tensor:
    """Return the flat index ``centre + (t' − t)`` of the kernel entry of a pair, −1 outside the
    kernel.
    """
    index = torch.zeros_like(target - source)
    inside = torch.ones_like(index, dtype=torch.bool)
    stride = math.prod(grid)
    for size, length in zip(kernel, grid, strict=True):
        stride //= length
        step = (source // stride) % length - (target // stride) % length + size // 2
        inside &= (step >= 0) & (step < size)
        index = index * size + step
    return torch.where(inside, index, -1)


def kernel_offsets(kernel: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the offset ``t' − t`` of each kernel entry, in the order of ``weight.flatten(1)``."""
    return list(itertools.product(*(range(-(size // 2), size // 2 + 1) for size in kernel)))


def kernel_reach(kernel: Sequence[int], grid: Sequence[int]) -> int:
    """Return how many tokens a causal kernel reaches back in raster order."""
    return sum(
        min(size // 2, length - 1) * math.prod(grid[axis + 1 :])
        for axis, (size, length) in enumerate(zip(kernel, grid, strict=True))
    )


def crop_kernel(weight: Tensor, grid: Sequence[int]) -> Tensor:
    """Return w [h, *K] without the entries that no pair of tokens on the grid reaches."""
    for dim, length in enumerate(grid, start=1):
        extra = weight.shape[dim] // 2 - min(weight.shape[dim] // 2, length - 1)
        weight = weight.narrow(dim, extra, weight.shape[dim] - 2 * extra)
    return weight


def split_joined(qkv: Tensor, heads: int, gate: Any) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the query, None without a gate, the key [B, T, heads] and the value of [B, T, C]."""
    others = qkv.shape[2] - heads
    channels = others if gate == 'none' else others // 2
    query, key, value = qkv.split([others - channels, heads, channels], 2)
    return (None if gate == 'none' else query), key, value


def split(x: Tensor, block: int, fill: float = 0.0) -> Tensor:
    """Return [T, C] as blocks [n, c, C], the last padded with `fill`."""
    count = -(-x.shape[0] // block)
    missing = count * block - x.shape[0]
    if torch.compiler.is_compiling() or missing:
        x = F.pad(x, (0, 0, 0, missing), value=fill)
    return x.view(count, block, -1)


def neighbours(x: Tensor, block: int, before: int, after: int, fill: float = 0.0) -> Tensor:
    """Return [T, C] as views [n, (before + 1 + after)·c, C] around each block."""
    if before == after == 0 and block == x.shape[0]:
        return x.unsqueeze(0)  # an exported graph leaves sizes open
    tail = -x.shape[0] % block + after * block
    if before or tail:
        x = F.pad(x, (0, 0, before * block, tail), value=fill)
    return x.unfold(0, (before + 1 + after) * block, block).transpose(1, 2)
