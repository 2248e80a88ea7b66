"""Masks of windows, compared with explicit sets of cells."""

import pytest
import torch

from aft_mm import ops
from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE
from aft_mm.ops.geometry import hard_mask

from .cases import indices


def two_blocks(grid, window):
    """Algorithm 2 of the ICLR submission, bool [T, T].

    The right block is the left block of the row above, moved right by half of the window; a cell
    counts once.
    """
    (height, width), (half_rows, half_columns) = grid, (size // 2 for size in window)
    mask = torch.zeros(height, width, height, width, dtype=torch.bool)
    for row in range(height):
        for column in range(width):
            for up in range(half_rows):
                for back in range(half_columns):
                    left = row - up, column - back
                    right = row - up - 1, column - back + half_columns
                    for r, c in (left, right):
                        if 0 <= r < height and 0 <= c < width:
                            mask[row, column, r, c] = True
    return mask.flatten(0, 1).flatten(1)


GRIDS = [
    ((5, 7), (4, 2)),
    ((7, 5), (2, 6)),
    ((6, 9), (2, 2)),
    ((4, 6), (6, 4)),
    ((5, 7), (10, 14)),
    ((3, 4), (8, 8)),
    ((3, 4), (20, 2)),
    ((3, 4), (2, 20)),
    ((1, 9), (4, 6)),
    ((9, 1), (4, 6)),
    ((1, 1), (2, 2)),
]


@pytest.mark.parametrize('grid, window', GRIDS)
def test_causal_window_of_a_grid_is_two_blocks(grid, window, monkeypatch):
    expected = two_blocks(grid, window)
    tokens = len(expected)
    for given in (window, window[0]) if window[0] == window[1] else (window,):
        assert torch.equal(hard_mask(*indices(tokens), given, grid, causal=True), expected)
    assert expected.diagonal().all() and not expected.triu(1).any()
    # The mean of unit vectors shows which ones are included.
    cells = torch.eye(tokens, dtype=torch.float64)[None]
    weights = expected / expected.sum(1, keepdim=True, dtype=torch.float64)
    for backend in ('reference', 'eager'):
        monkeypatch.setenv(ENVIRONMENT_VARIABLE, backend)
        got = ops.aft_local_hard(
            None, torch.zeros_like(cells), cells, window=window, grid=grid, gate='none'
        )
        torch.testing.assert_close(got[0], weights)


@pytest.mark.parametrize('grid, window', GRIDS)
def test_buffer_is_as_long_as_the_window_reaches_back(grid, window):
    target, source = indices(grid[0] * grid[1])
    reach = (target - source).masked_fill(~two_blocks(grid, window), 0).max()
    state = ops.aft_local_hard_init_state(1, 3, window=window, grid=grid)
    assert state.keys.shape[1] == reach + 1
