import sys
from collections.abc import Sequence
from datetime import timedelta
from time import monotonic
from typing import Any

import numpy as np

from aft_mm.checks import check_int
from aft_mm.datasets.transforms.images import central_square, shrink
from aft_mm.engine import derived_seed
from aft_mm.errors import UserError
from aft_mm.images import read_image
from aft_mm.models.decoding import check_sampling
from aft_mm.visualization import check_super_resolution, super_resolve

from .loading import Checkpoint, ConfigSource, Device, ImageSource, check_options, load_model


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


TILES_AT_ONCE = 64


class SuperResolver:
    """Sample enlargements of small images.

    ``temperature`` is 0.8 by default.

    Args:
        config: Config with ``image_shape = (H, W, C)`` and ``source_shape = (h, w, C)``, or its
            path.
    """

    def __init__(self, config: ConfigSource, checkpoint: Checkpoint, device: Device = None) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'SuperResolver')
        self.image_shape = tuple(self.config.image_shape)
        self.source_shape = tuple(self.config.source_shape)
        check_super_resolution(self.model, self.image_shape, self.source_shape)

    def __call__(self, image: ImageSource, num: int = 1, **options: Any) -> np.ndarray:
        """Sample enlargements of one image.

        Args:
            image: Path, array or PIL image as in :func:`aft_mm.images.rgb_of`, of h x w pixels.
            **options: Those of :func:`aft_mm.models.generate`.

        Returns:
            uint8 ``[num, H, W, C]``.
        """
        pixels = self._checked(image)
        if pixels.shape != self.source_shape:
            height, width, _ = self.source_shape
            raise UserError(
                f'image must be {height} x {width} pixels (height x width), got '
                f'{pixels.shape[0]} x {pixels.shape[1]}; --fit (in Python fit(image)) shrinks its '
                'centre to that size, and --tile (tile(image)) cuts it into tiles of that size'
            )
        samples: np.ndarray = self._sample(pixels[None], num, **options)[0]
        return samples

    def fit(self, image: ImageSource, crop_size: int | None = None) -> np.ndarray:
        """Shrink the central square of a larger image to the input size of the model, by area.

        Args:
            image: As for :meth:`__call__`, of H' x W' pixels.
            crop_size: Edge of the square [px], by default the largest possible.

        Returns:
            uint8 ``[h, w, C]``.

        Raises:
            UserError: ``image`` or ``crop_size`` does not fit, or the input of the model is not
                square.
        """
        pixels = self._checked(image)
        size, width, _ = self.source_shape
        if width != size:
            raise UserError(
                f'fit (--fit) needs a model with square inputs, got one with {size} x {width} '
                'pixels (height x width)'
            )
        edge = min(pixels.shape[:2])
        chosen = edge if crop_size is None else crop_size
        check_int('crop_size (--fit)', chosen)
        if not size <= chosen <= edge:
            raise UserError(
                f'crop_size (--fit) must be {size} to {edge} pixels, the shorter edge '
                f'of the image, got {chosen}'
            )
        return shrink(central_square(pixels, chosen), size)

    def tile(
        self, image: ImageSource, num: int = 1, overlap: int = 2, **options: Any
    ) -> np.ndarray:
        """Sample enlargements of a larger image, tile by tile.

        Tiles of h x w pixels are sampled independently and fade linearly into each other, so larger
        structures may not fit together.

        Args:
            image: As for :meth:`__call__`, of H' x W' pixels.
            overlap: Minimum overlap of tiles [px of ``image``], less than a tile.
            **options: Those of :func:`aft_mm.models.generate`.

        Returns:
            uint8 ``[num, H'·f, W'·f, C]`` with f = H / h.
        """
        pixels = self._checked(image)
        rows, columns = self.tile_starts(pixels, overlap)
        height, width, _ = self.source_shape
        tiles = cut_tiles(pixels, rows, columns, (height, width))
        seed = options.pop('seed', None)
        check_sampling(seed=seed)
        samples: list[np.ndarray] = []
        start = monotonic()
        for first in range(0, len(tiles), TILES_AT_ONCE):
            part = tiles[first : first + TILES_AT_ONCE]
            if options.get('progress', True):
                left = (monotonic() - start) / max(first, 1) * (len(tiles) - first)
                time = f', about {timedelta(seconds=round(left))} left' if first else ''
                print(
                    f'tiles {first + 1} to {first + len(part)} of {len(tiles)}{time}',
                    file=sys.stderr,
                )
            noise = None if seed is None else derived_seed(seed, first)
            samples.append(self._sample(part, num, seed=noise, **options))
        factor = self.image_shape[0] // height
        rows, columns = ([factor * start for start in starts] for starts in (rows, columns))
        return join_tiles(np.concatenate(samples), rows, columns, factor * overlap)

    def tile_starts(self, image: ImageSource, overlap: int = 2) -> tuple[list[int], list[int]]:
        """Return the rows and columns where the tiles of :meth:`tile` begin."""
        pixels = self._checked(image)
        height, width, _ = self.source_shape
        return (
            tile_starts(pixels.shape[0], height, overlap),
            tile_starts(pixels.shape[1], width, overlap),
        )

    def _sample(self, images: np.ndarray, num: int, **options: Any) -> np.ndarray:
        check_options(options)
        usual = 1.0 if options.get('greedy') else 0.8
        options = {'temperature': usual, 'progress': True, **options}
        return super_resolve(self.model, images, self.image_shape, num, **options)

    def _checked(self, source: ImageSource) -> np.ndarray:
        height, width, channels = self.source_shape
        image, _ = read_image(source, channels)
        if image.shape[0] < height or image.shape[1] < width:
            raise UserError(
                f'image must have at least {height} x {width} pixels (height x width), '
                f'got {image.shape[0]} x {image.shape[1]}'
            )
        return image
