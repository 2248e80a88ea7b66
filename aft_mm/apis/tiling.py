"""Cut images into overlapping tiles, and join tiles without seams."""

from collections.abc import Sequence

import numpy as np

from aft_mm.checks import check_int


def tile_starts(length: int, size: int, overlap: int) -> list[int]:
    """Return the starts of the fewest, evenly spaced tiles that cover an axis of at least `size`.

    `overlap`, 0 to size − 1, is the minimum of neighbouring tiles.
    """
    check_int('overlap (--tile)', overlap, 0, size - 1)
    count = -(-(length - size) // (size - overlap)) + 1
    return [i * (length - size) // max(1, count - 1) for i in range(count)]


def cross_fade_weights(starts: Sequence[int], size: int, overlap: int) -> np.ndarray:
    """Return the weight of each tile at each pixel of an axis, float64 ``[tiles, length]``."""
    position = np.arange(size) + 0.5
    window = np.minimum(1, np.minimum(position, size - position) / max(overlap, 0.5))
    weights = np.zeros((len(starts), starts[-1] + size))
    for row, start in zip(weights, starts, strict=True):
        row[start : start + size] = window
    weights /= weights.sum(0)
    return weights


def cut_tiles(
    image: np.ndarray, rows: Sequence[int], columns: Sequence[int], size: tuple[int, int]
) -> np.ndarray:
    """Cut an image ``[H, W, C]`` into tiles ``[rows · columns, h, w, C]``."""
    height, width = size
    return np.stack([image[y : y + height, x : x + width] for y in rows for x in columns])


def join_tiles(
    tiles: np.ndarray, rows: Sequence[int], columns: Sequence[int], overlap: int
) -> np.ndarray:
    """Join overlapping tiles by cross-fading.

    Args:
        tiles: N samples of each tile, row by row: uint8 ``[rows · columns, N, h, w, C]``.
        rows, columns: Ascending starts of the tiles [px].
        overlap: As for :func:`cross_fade_weights`.

    Returns:
        uint8 ``[N, H, W, C]``.
    """
    height, width = tiles.shape[2:4]
    vertical = cross_fade_weights(rows, height, overlap)
    horizontal = cross_fade_weights(columns, width, overlap)
    image = np.zeros((tiles.shape[1], vertical.shape[1], horizontal.shape[1], tiles.shape[4]))
    places = ((i, j) for i in range(len(rows)) for j in range(len(columns)))
    for tile, (i, j) in zip(tiles, places, strict=True):
        y, x = (
            slice(start, start + size) for start, size in ((rows[i], height), (columns[j], width))
        )
        weight = vertical[i, y, None] * horizontal[j, None, x]
        image[:, y, x] += weight[..., None] * tile
    return image.round().astype(np.uint8)
