"""Pipeline steps for images as sequences."""

from collections.abc import Sequence

import numpy as np
import torch

from aft_mm.checks import check_choice, check_int, check_sizes
from aft_mm.registry import TRANSFORMS
from aft_mm.structures import SequenceSample

from .base import Transform


@TRANSFORMS.register_module()
class RandomValueShift(Transform):
    """Add one random integer to all sub-pixels, clipped to 0..255, as both AFT papers do.

    Args:
        max_shift: Largest absolute value of the integer [grey levels].
    """

    def __init__(self, max_shift: int = 10) -> None:
        check_int('max_shift', max_shift, 0, 255)
        self.max_shift = max_shift

    def transform(self, results: dict) -> dict:
        shift = np.random.randint(-self.max_shift, self.max_shift + 1)
        image = results['img'].astype(np.int16) + shift
        results['img'] = image.clip(0, 255).astype(np.uint8)
        return results


@TRANSFORMS.register_module()
class PackSequence(Transform):
    """Flatten an image to a sequence in raster order; the last step of a pipeline.

    Returns ``dict(inputs=uint8 [T] or [T, C], data_samples=SequenceSample(length=T))``, with
    ``source`` and ``warnings`` if there are any.

    Args:
        image_shape: ``(H, W, C)`` of every image, C = 1 or 3 (RGB).
        tokens: ``'subpixels'``: T = H·W·C values, R, G, B of a pixel in turn; ``'pixels'``: T = H·W
            vectors of C values.

    Raises:
        ValueError: If an image has another shape or is not uint8.
    """

    def __init__(self, image_shape: Sequence[int], tokens: str = 'subpixels') -> None:
        check_sizes('image_shape (H, W, C)', image_shape, (3,))
        check_choice('tokens', tokens, ('subpixels', 'pixels'))
        self.image_shape = tuple(image_shape)
        self.tokens = tokens

    def transform(self, results: dict) -> dict:
        image = np.atleast_3d(results['img'])
        if image.shape != self.image_shape or image.dtype != np.uint8:
            name = repr(results['img_path']) if 'img_path' in results else results.get('sample_idx')
            raise ValueError(
                f'image{"" if name is None else f" {name}"} must be uint8 of '
                f'image_shape {self.image_shape}, got {image.dtype} of shape '
                f'{image.shape}'
            )
        tokens = self._flatten(image)
        sample = SequenceSample(metainfo=dict(length=len(tokens), num_context=0))
        if 'source' in results:
            sample.source = self._flatten(np.atleast_3d(results['source']))
        if 'warnings' in results:
            sample.set_metainfo(dict(warnings=results['warnings']))
        return dict(inputs=tokens, data_samples=sample)

    def _flatten(self, image: np.ndarray) -> torch.Tensor:
        shape = (-1,) if self.tokens == 'subpixels' else (-1, image.shape[-1])
        # torch has no negative strides, as of a flipped image.
        return torch.from_numpy(np.ascontiguousarray(image.reshape(shape)))
