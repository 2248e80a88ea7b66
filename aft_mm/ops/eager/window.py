"""AFT-local-hard: W = 1 inside a window and 0 outside.

Sums slide over the dimensions of [B, *grid, D].
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..export_paths import replaying
from ..geometry import Window, as_pair
from ..online_softmax import (
    FAST_RANGE,
    Summable,
    add,
    apply_gate,
    column_shift,
    from_token,
    hide,
    key_range,
    mean,
    mean_by_columns,
    pad,
    shift,
    sliding_sum,
)
from ..path_choice import choose


def aft_local_hard(
    query: Tensor | None,
    key: Tensor,
    value: Tensor,
    *,
    window: Window,
    grid: Sequence[int] | None,
    causal: bool,
    key_mask: Tensor | None,
    gate: str,
) -> Tensor:
    """Compute :func:`aft_mm.ops.aft_local_hard` in O(T·log(s)·D), by sliding sums."""
    dtype, tokens = value.dtype, value.shape[1]
    key, value = hide(key, value, key_mask)
    grid = (tokens,) if grid is None else tuple(grid)
    key, value = key.unflatten(1, grid), value.unflatten(1, grid)
    grid_dims = tuple(range(1, 1 + len(grid)))

    def fast(key: Tensor, value: Tensor) -> Tensor:
        weight = torch.exp(key - column_shift(key, grid_dims))
        numerator = _window_sums(weight * value, window, grid, causal)
        return mean(numerator, _window_sums(weight, window, grid, causal))

    def safe(key: Tensor, value: Tensor) -> Tensor:
        sums = _window_sums(from_token(key.double(), value.double()), window, grid, causal)
        return mean(sums.numerator, sums.denominator).to(key.dtype)

    otherwise = partial(mean_by_columns, fast, safe)
    mixed = choose(key_range(key, grid_dims) <= FAST_RANGE, fast, otherwise, key, value)
    return apply_gate(query, mixed.flatten(1, len(grid)), gate, dtype)


def _window_sums(x: Summable, window: Window, grid: tuple[int, ...], causal: bool) -> Summable:
    if len(grid) == 1:
        size = window if isinstance(window, int) else window[0]
        return sliding_sum(x, size - 1, 0 if causal else size - 1, 1)
    rows, columns = (size // 2 for size in as_pair(window))
    if not causal:
        return sliding_sum(sliding_sum(x, columns - 1, columns, 2), rows - 1, rows, 1)
    if not replaying():
        columns = min(columns, grid[1])
    # The right block is the left block of the row above, which may end beyond the grid.
    left = sliding_sum(sliding_sum(pad(x, 0, columns, 2), columns - 1, 0, 2), rows - 1, 0, 1)
    right = shift(pad(left, -columns, 0, 2), 1, 1)
    return add(pad(left, 0, -columns, 2), right)
