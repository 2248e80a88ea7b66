"""Large images from small ones."""

import os
import sys
from datetime import timedelta
from time import monotonic
from typing import Any

import numpy as np
import torch
from mmengine.config import Config

from aft_mm.checks import check_int
from aft_mm.datasets.transforms.images import central_square, shrink
from aft_mm.engine import derived_seed
from aft_mm.errors import UserError
from aft_mm.models.decoding import check_sampling
from aft_mm.sampling.super_resolution import check_super_resolution, super_resolve
from aft_mm.sampling.tiling import cut_tiles, join_tiles, tile_starts

from .loading import load_model

TILES_AT_ONCE = 64


class SuperResolver:
    """Draw what an image of a few pixels may have looked like.

    ::

        resolver = SuperResolver('config.py', 'epoch_200.pth')
        samples = resolver(image, num=4, seed=0)            # of an image of exactly 8 x 8 pixels
        samples = resolver(resolver.fit(photo), num=4)      # of the middle of any larger one
        samples = resolver.tile(photo)                      # of all of it, tile by tile

    Every drawing method takes the options of ``AutoregressiveModel.generate``: ``temperature``
    (0.8 unless said otherwise), ``top_k``, ``top_p``, ``greedy``, ``seed`` and ``progress``, which
    is on.

    Args:
        config: Path of a config with ``image_shape = (H, W, C)`` and ``source_shape = (h, w, C)``,
            or the config itself.
        checkpoint: Path or http address of a checkpoint that ``tools/train.py`` wrote.
        device: Where to compute; by default an accelerator if there is one.

    Raises:
        UserError: a file does not exist, the checkpoint is of another model, or the config is
            none of super-resolution.
    """

    def __init__(
        self,
        config: str | os.PathLike | Config,
        checkpoint: str | os.PathLike,
        device: str | torch.device | None = None,
    ) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'SuperResolver')
        self.image_shape = tuple(self.config.image_shape)
        self.source_shape = tuple(self.config.source_shape)
        check_super_resolution(self.model, self.image_shape, self.source_shape)

    def __call__(self, image: np.ndarray, num: int = 1, **options: Any) -> np.ndarray:
        """Draw ``num`` samples of one image: uint8 ``[num, H, W, C]``.

        Args:
            image: uint8 ``[h, w, C]`` of exactly ``source_shape``, RGB where C = 3.
            num: How many.

        Raises:
            UserError: ``image`` has another shape or type.
            ValueError: ``num`` is below 1.
            ValueError: An option is out of range.
        """
        image = self._checked(image)
        if image.shape != self.source_shape:
            height, width, _ = self.source_shape
            raise UserError(
                f'image must be of {height} x {width} pixels (height x width), got '
                f'{image.shape[0]} x {image.shape[1]}; --fit, in Python fit(image), shrinks its '
                'middle to that size, and --tile, tile(image), cuts it into such tiles'
            )
        return self._draw(image[None], num, **options)[0]

    def fit(self, image: np.ndarray, crop_size: int | None = None) -> np.ndarray:
        """Shrink the middle of a larger image to what the model reads: uint8 ``[h, w, C]``.

        The central square is shrunk by area. In training it is shrunk twice, to the size of the
        output and then to this one, and rounded each time, so that a value may differ by one. For a
        model of whole things, such as aligned faces.

        Args:
            image: uint8 ``[H', W', C]``.
            crop_size: Edge of the square [px], by default the largest that there is; a face should
                fill it as in the images that the model was trained on.

        Raises:
            UserError: ``image`` has another type or is smaller than what the model reads,
                ``crop_size`` is smaller than that or larger than the image, or the model does not
                read squares.
        """
        image = self._checked(image)
        size, width, _ = self.source_shape
        if width != size:
            raise UserError(
                f'fit (--fit) gives squares, but the model reads {size} x {width} '
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
        """Draw ``num`` samples of a larger image tile by tile: uint8 ``[num, H'·f, W'·f, C]``.

        The image is cut into tiles of h x w pixels that overlap, as few as will do, spread evenly.
        :meth:`tile_starts` tells how many they are, and the work is ``num`` samples of each.
        Every tile is drawn on its own and knows nothing of its neighbours; where two overlap, one
        fades linearly into the other, pixel by pixel. That hides the seams, but an overlap is the
        mean of independent samples and therefore smoother than the rest, and what spans several
        tiles need not fit together. For a model that was trained on crops of images.

        Args:
            image: uint8 ``[H', W', C]``.
            num: How many.
            overlap: Pixels of ``image`` by which neighbours overlap at least, 0 to the edge of a
                tile − 1.

        Raises:
            UserError: ``image`` has another type or is smaller than a tile, or ``overlap`` or
                ``num`` is out of range.
            ValueError: An option is out of range.
        """
        rows, columns = self.tile_starts(image, overlap)
        height, width, _ = self.source_shape
        tiles = cut_tiles(image, rows, columns, (height, width))
        seed = options.pop('seed', None)
        check_sampling(seed=seed)
        drawn: list[np.ndarray] = []
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
            drawn.append(self._draw(part, num, seed=noise, **options))
        factor = self.image_shape[0] // height
        return join_tiles(
            np.concatenate(drawn),
            [factor * start for start in rows],
            [factor * start for start in columns],
            factor * overlap,
        )

    def tile_starts(self, image: np.ndarray, overlap: int = 2) -> tuple[list[int], list[int]]:
        """The rows and the columns of ``image`` where the tiles of :meth:`tile` begin.

        Raises:
            UserError: as :meth:`tile`.
        """
        image = self._checked(image)
        height, width, _ = self.source_shape
        return (
            tile_starts(image.shape[0], height, overlap),
            tile_starts(image.shape[1], width, overlap),
        )

    def _draw(self, images: np.ndarray, num: int, **options: Any) -> np.ndarray:
        options = {'temperature': 0.8, 'progress': True, **options}
        return super_resolve(self.model, images, self.image_shape, num, **options)

    def _checked(self, image: np.ndarray) -> np.ndarray:
        """The image as an array, of the type and the channels that the model reads, and no smaller."""
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
                f'but has {image.shape[0]} x {image.shape[1]}'
            )
        return image
