"""Pipeline steps for images."""

import cv2
import numpy as np

from aft_mm.checks import check_int, refuse
from aft_mm.errors import UnusableFile
from aft_mm.images import read_rgb
from aft_mm.registry import TRANSFORMS

from .base import Transform


@TRANSFORMS.register_module()
class LoadRGBImage(Transform):
    """Read ``results['img_path']`` into ``results['img']``, uint8 RGB [H, W, 3].

    Warnings of :func:`aft_mm.images.read_rgb` become ``results['warnings']``,
    ``{warning: file}``.
    """

    def transform(self, results: dict) -> dict:
        path = results['img_path']
        results['img'], warnings = read_rgb(path)
        if warnings:
            results['warnings'] = dict.fromkeys(warnings, path)
        return results


@TRANSFORMS.register_module()
class SuperResolutionPair(Transform):
    """The central square of an image at two sizes, ``img`` and, shrunk again by area, ``source``.

    Args:
        size: Height and width of ``img`` [px].
        scale_factor: Ratio of the two sizes; it divides ``size``.
        crop_size: Edge of the square [px], at least ``size``; by default the largest.
    """

    def __init__(self, size: int = 32, scale_factor: int = 4, crop_size: int | None = None) -> None:
        check_int('size', size, 1)
        check_int('scale_factor', scale_factor, 1)
        if size % scale_factor:
            refuse('size', f'a multiple of scale_factor={scale_factor}', size)
        if crop_size is not None:
            check_int('crop_size', crop_size, size)
        self.size = size
        self.scale_factor = scale_factor
        self.crop_size = crop_size

    def transform(self, results: dict) -> dict:
        """Replace ``img`` [H, W, C] by [size, size, C] and add ``source``, both uint8.

        Raises:
            UnusableFile: If the image is smaller than the crop or ``size``.
        """
        image = results['img']
        edge = min(image.shape[:2])
        if edge < (self.crop_size or self.size):
            raise UnusableFile(
                f'image {results.get("img_path")!r} of {image.shape[0]} x {image.shape[1]} px is '
                f'smaller than the crop of {self.crop_size or self.size} px'
            )
        image = shrink(central_square(image, self.crop_size or edge), self.size)
        results['img'] = image
        results['source'] = shrink(image, self.size // self.scale_factor)
        return results


def central_square(image: np.ndarray, edge: int) -> np.ndarray:
    top, left = ((length - edge) // 2 for length in image.shape[:2])
    return image[top : top + edge, left : left + edge]


def shrink(image: np.ndarray, size: int) -> np.ndarray:
    small = cv2.resize(image, (size, size), interpolation=cv2.INTER_AREA)
    return small.reshape(size, size, *image.shape[2:])  # cv2 drops an axis of one channel
