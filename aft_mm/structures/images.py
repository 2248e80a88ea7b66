"""Images as arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

__all__ = ['enlarge_bicubic']


def enlarge_bicubic(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Enlarge uint8 [h, w, C], C = 1 or 3, to uint8 [H, W, C] by Pillow's bicubic interpolation.

    Args:
        image: uint8 [h, w, C], C = 1 or 3.
        size: Height and width of the result [px].
    """
    import numpy as np
    from PIL import Image

    height, width = size
    planes = [
        Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC)
        for plane in np.moveaxis(image, -1, 0)
    ]
    return np.stack(planes, axis=-1)
