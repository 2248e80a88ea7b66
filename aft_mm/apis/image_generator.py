"""Images from a trained model."""

import os
from typing import Any

import numpy as np
import torch
from mmengine.config import Config

from aft_mm.errors import UserError
from aft_mm.visualization import check_image_shape, complete_images, given_rows, sample_images

from .loading import load_model


class ImageGenerator:
    """Draw and complete images, pixel by pixel.

    ::

        generator = ImageGenerator('config.py', 'epoch_100.pth')
        samples = generator.sample(16, seed=0)
        completed = generator.complete(images, keep=0.5)

    Both methods take the options of ``AutoregressiveModel.generate``: ``temperature``, ``top_k``,
    ``top_p``, ``greedy``, ``seed`` and ``progress``, which is on unless said otherwise.

    Args:
        config: Path of a config with ``image_shape = (H, W, C)``, or the config itself.
        checkpoint: Path or http address of a checkpoint that ``tools/train.py`` wrote.
        device: Where to compute; by default an accelerator if there is one.

    Raises:
        UserError: a file does not exist, the checkpoint is of another model, or the config is
            none of images.
    """

    def __init__(
        self,
        config: str | os.PathLike | Config,
        checkpoint: str | os.PathLike,
        device: str | torch.device | None = None,
    ) -> None:
        self.config, self.model = load_model(config, checkpoint, device, 'ImageGenerator')
        self.image_shape = tuple(self.config.image_shape)
        check_image_shape(self.model, self.image_shape)

    def sample(self, num: int = 1, **options: Any) -> np.ndarray:
        """Draw images: uint8 ``[num, H, W, C]``.

        Raises:
            ValueError: ``num`` is below 1, or an option is out of range.
        """
        return sample_images(self.model, self.image_shape, num, **{'progress': True, **options})

    def complete(self, images: np.ndarray, keep: float = 0.5, **options: Any) -> np.ndarray:
        """Draw the lower part of images: uint8 ``[N, H, W, C]``.

        Args:
            images: uint8 ``[N, H, W, C]``, RGB where C = 3.
            keep: Share of the rows, from the top, that stays; at least one row stays and one is
                drawn.

        Raises:
            ValueError: ``images`` is empty or has another shape or type, or ``keep`` or an option
                is out of range.
        """
        images = np.asarray(images)
        if images.shape[1:] != self.image_shape or images.dtype != np.uint8:
            raise UserError(
                f'images must be uint8 [N, {", ".join(map(str, self.image_shape))}], '
                f'got {images.dtype} {list(images.shape)}'
            )
        rows = given_rows(keep, self.image_shape[0])
        return complete_images(self.model, images, rows, **{'progress': True, **options})
