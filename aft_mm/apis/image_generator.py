from typing import Any

import numpy as np

from aft_mm.errors import UserError
from aft_mm.visualization import check_image_shape, complete_images, given_rows, sample_images

from .loading import ConfigSource, Device, FilePath, check_options, load_model


class ImageGenerator:
    """Sample and complete images, pixel by pixel.

    Both methods take the options of :func:`aft_mm.models.generate`.

    Args:
        config: Config with ``image_shape = (H, W, C)``, or its path.
    """

    def __init__(self, config: ConfigSource, checkpoint: FilePath, device: Device = None) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'ImageGenerator')
        self.image_shape = tuple(self.config.image_shape)
        check_image_shape(self.model, self.image_shape)

    def sample(self, num: int = 1, **options: Any) -> np.ndarray:
        """Sample images, uint8 ``[num, H, W, C]``."""
        check_options(options)
        return sample_images(self.model, self.image_shape, num, **{'progress': True, **options})

    def complete(self, images: np.ndarray, keep: float = 0.5, **options: Any) -> np.ndarray:
        """Sample the lower part of images.

        Args:
            images: uint8 ``[N, H, W, C]``, RGB if C = 3.
            keep: Share of the upper rows that is given; at least one is given and one left.

        Returns:
            uint8 ``[N, H, W, C]``.
        """
        images = np.asarray(images)
        if images.shape[1:] != self.image_shape or images.dtype != np.uint8:
            raise UserError(
                f'images must be uint8 [N, {", ".join(map(str, self.image_shape))}], '
                f'got {images.dtype} {list(images.shape)}'
            )
        check_options(options)
        rows = given_rows(keep, self.image_shape[0])
        return complete_images(self.model, images, rows, **{'progress': True, **options})
