import sys
from datetime import timedelta
from time import monotonic
from typing import Any

import numpy as np

from aft_mm.checks import check_int
from aft_mm.datasets.transforms.images import central_square, shrink
from aft_mm.engine import derived_seed
from aft_mm.errors import UserError
from aft_mm.models.decoding import check_sampling
from aft_mm.visualization import check_super_resolution, super_resolve

from .loading import ConfigSource, Device, FilePath, load_model
from .tiling import cut_tiles, join_tiles, tile_starts

TILES_AT_ONCE = 64


class SuperResolver:
    """Sample enlargements of small images.

    ``temperature`` is 0.8 by default.

    Args:
        config: Config with ``image_shape = (H, W, C)`` and ``source_shape = (h, w, C)``, or its
            path.
    """

    def __init__(self, config: ConfigSource, checkpoint: FilePath, device: Device = None) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'SuperResolver')
        self.image_shape = tuple(self.config.image_shape)
        self.source_shape = tuple(self.config.source_shape)
        check_super_resolution(self.model, self.image_shape, self.source_shape)

    def __call__(self, image: np.ndarray, num: int = 1, **options: Any) -> np.ndarray:
        """Sample enlargements of one image.

        Args:
            image: uint8 ``[h, w, C]`` of exactly ``source_shape``, RGB if C = 3.
            **options: Those of :func:`aft_mm.models.generate`.

        Returns:
            uint8 ``[num, H, W, C]``.
        """
        image = self._checked(image)
        if image.shape != self.source_shape:
            height, width, _ = self.source_shape
            raise UserError(
                f'image must be {height} x {width} pixels (height x width), got '
                f'{image.shape[0]} x {image.shape[1]}; --fit (in Python fit(image)) shrinks its '
                'centre to that size, and --tile (tile(image)) cuts it into tiles of that size'
            )
        samples: np.ndarray = self._sample(image[None], num, **options)[0]
        return samples

    def fit(self, image: np.ndarray, crop_size: int | None = None) -> np.ndarray:
        """Shrink the central square of a larger image to the input size of the model, by area.

        Args:
            image: uint8 ``[H', W', C]``.
            crop_size: Edge of the square [px], by default the largest possible.

        Returns:
            uint8 ``[h, w, C]``.

        Raises:
            UserError: ``image`` or ``crop_size`` does not fit, or the input of the model is not
                square.
        """
        image = self._checked(image)
        size, width, _ = self.source_shape
        if width != size:
            raise UserError(
                f'fit (--fit) needs a model with square inputs, got one with {size} x {width} '
                'pixels (height x width)'
            )
        edge = min(image.shape[:2])
        chosen = edge if crop_size is None else crop_size
        check_int('crop_size (--fit)', chosen)
        if not size <= chosen <= edge:
            raise UserError(
                f'crop_size (--fit) must be {size} to {edge} pixels, the shorter edge '
                f'of the image, got {chosen}'
            )
        return shrink(central_square(image, chosen), size)

    def tile(self, image: np.ndarray, num: int = 1, overlap: int = 2, **options: Any) -> np.ndarray:
        """Sample enlargements of a larger image, tile by tile.

        Tiles of h x w pixels are sampled independently and fade linearly into each other, so larger
        structures may not fit together.

        Args:
            image: uint8 ``[H', W', C]``.
            overlap: Minimum overlap of tiles [px of ``image``], less than a tile.
            **options: Those of :func:`aft_mm.models.generate`.

        Returns:
            uint8 ``[num, H'·f, W'·f, C]`` with f = H / h.
        """
        rows, columns = self.tile_starts(image, overlap)
        height, width, _ = self.source_shape
        tiles = cut_tiles(image, rows, columns, (height, width))
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

    def tile_starts(self, image: np.ndarray, overlap: int = 2) -> tuple[list[int], list[int]]:
        """Return the rows and columns where the tiles of :meth:`tile` begin."""
        image = self._checked(image)
        height, width, _ = self.source_shape
        return (
            tile_starts(image.shape[0], height, overlap),
            tile_starts(image.shape[1], width, overlap),
        )

    def _sample(self, images: np.ndarray, num: int, **options: Any) -> np.ndarray:
        usual = 1.0 if options.get('greedy') else 0.8
        options = {'temperature': usual, 'progress': True, **options}
        return super_resolve(self.model, images, self.image_shape, num, **options)

    def _checked(self, image: np.ndarray) -> np.ndarray:
        image = np.asarray(image)
        height, width, channels = self.source_shape
        if image.ndim != 3 or image.shape[2] != channels or image.dtype != np.uint8:
            raise UserError(
                f'image must be uint8 [height, width, {channels}], got '
                f'{image.dtype} {list(image.shape)}'
            )
        if image.shape[0] < height or image.shape[1] < width:
            raise UserError(
                f'image must have at least {height} x {width} pixels (height x width), '
                f'got {image.shape[0]} x {image.shape[1]}'
            )
        return image
