"""From an image file to a pair of a small and a large image."""

import mmcv
import numpy as np
from mmcv.transforms import BaseTransform

from aft_mm.checks import check_int, refuse
from aft_mm.registry import TRANSFORMS

from ..file_dataset import UnusableFile
from ..image_files import read_rgb


@TRANSFORMS.register_module()
class LoadRGBImage(BaseTransform):
    """Read ``results['img_path']`` to ``results['img']``, uint8 RGB [H, W, 3], whatever its kind.

    mmcv's LoadImageFromFile reads truncated files without complaint and drops alpha. What was done
    to a grey or transparent image is noted in ``results['remarks']``, ``{sentence: file}``; see
    :func:`aft_mm.datasets.read_rgb`, which raises UnusableFile for damaged files.
    """

    def transform(self, results: dict) -> dict:
        """Add ``img`` and, where there is something to remark, ``remarks``."""
        path = results['img_path']
        results['img'], sentences = read_rgb(path)
        if sentences:
            results['remarks'] = dict.fromkeys(sentences, path)
        return results


@TRANSFORMS.register_module()
class SuperResolutionPair(BaseTransform):
    """The centre of an image in two sizes: ``img`` to be drawn, ``source`` to draw it from.

    ``img`` is the central square shrunk to ``size`` px, ``source`` is ``img`` shrunk once more;
    both by area, so that a pixel is the mean of what it covers, rounded to an integer. A flip
    belongs before this step.

    Args:
        size: Height and width of ``img`` [px].
        scale_factor: How many times smaller ``source`` is; it divides ``size``.
        crop_size: Edge of the central square [px], at least ``size``; the largest one unless given.

    Raises:
        ValueError: An argument is out of range.
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
            UnusableFile: The image is smaller than the crop, or than ``size``.
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
    """``[edge, edge, C]`` from the middle of ``image [H, W, C]``; an odd pixel is left over below
    and on the right.
    """
    top, left = ((length - edge) // 2 for length in image.shape[:2])
    return image[top : top + edge, left : left + edge]


def shrink(image: np.ndarray, size: int) -> np.ndarray:
    """Resize to ``[size, size, C]`` by area; OpenCV weighs pixels by the part that is covered."""
    return mmcv.imresize(image, (size, size), interpolation='area', backend='cv2')
