"""Images cut into overlapping tiles, and put together again without seams."""

from collections.abc import Sequence

import numpy as np

from aft_mm.checks import check_int


def tile_starts(length: int, size: int, overlap: int) -> list[int]:
    """Where tiles of ``size`` begin that cover ``length`` and overlap by ``overlap`` or more.

    As few tiles as will do, spread evenly, the first and the last at the ends; ``length`` is at
    least ``size``.

    Raises:
        ValueError: ``overlap`` is not in 0..size − 1.
    """
    check_int('overlap (--tile)', overlap, 0, size - 1)
    count = -(-(length - size) // (size - overlap)) + 1
    return [i * (length - size) // max(1, count - 1) for i in range(count)]


def cross_fade_weights(starts: Sequence[int], size: int, overlap: int) -> np.ndarray:
    """The weight of every tile at every pixel of an axis: float64 ``[tiles, length]``.

    A tile's weight rises linearly over its first ``overlap`` pixels and falls over its last. Then
    the weights of a pixel are divided by their sum: they sum to one, and where exactly two tiles
    overlap by ``overlap`` pixels, one fades linearly into the other. No tile begins or ends with a
    step, except with ``overlap`` = 0.
    """
    place = np.arange(size) + 0.5
    window = np.minimum(1, np.minimum(place, size - place) / max(overlap, 0.5))
    weights = np.zeros((len(starts), starts[-1] + size))
    for row, start in zip(weights, starts, strict=True):
        row[start : start + size] = window
    return weights / weights.sum(0)


def cut_tiles(
    image: np.ndarray, rows: Sequence[int], columns: Sequence[int], size: tuple[int, int]
) -> np.ndarray:
    """The tiles ``[rows · columns, h, w, C]`` of an image ``[H, W, C]``, row by row."""
    height, width = size
    return np.stack([image[y : y + height, x : x + width] for y in rows for x in columns])


def join_tiles(
    tiles: np.ndarray, rows: Sequence[int], columns: Sequence[int], overlap: int
) -> np.ndarray:
    """Cross-fade tiles: uint8 ``[rows · columns, N, h, w, C]`` to ``[N, H, W, C]``.

    Args:
        tiles: N versions of every tile, row by row.
        rows: Where the tiles begin, from above, ascending [pixels of the tiles].
        columns: The same from the left.
        overlap: As for :func:`cross_fade_weights`.
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
