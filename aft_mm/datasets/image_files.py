"""Reading image files as RGB."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from aft_mm.image_paths import IMAGE_FORMATS

from .file_dataset import UnusableFile, check_regular, quoted, reason_of

GREY = 'a grey image is read as three equal channels'
COLOUR = 'a colour image is converted to grey'
ALPHA = 'a transparent image is laid on white'
# A file may have 2^24 pixels, or 64 per byte; decompression bombs have hundreds.
_SMALL = 2**24
_PIXELS_PER_BYTE = 64


def read_rgb(path: str | Path) -> tuple[np.ndarray, list[str]]:
    """Read an image, rotated by its EXIF orientation; of 16 bits the upper 8 remain.

    Returns:
        The image, uint8 [H, W, 3], and the warnings :data:`GREY` and :data:`ALPHA` that apply.

    Raises:
        UnusableFile: If the file is missing, damaged, not an image, a decompression bomb, or has
            values without a fixed range.
    """
    try:
        num_bytes = check_regular(path)
        with Image.open(path, formats=IMAGE_FORMATS) as file:
            num_pixels = file.width * file.height
            if num_pixels > max(_SMALL, _PIXELS_PER_BYTE * num_bytes):
                raise UnusableFile(
                    f'image {quoted(path)} has {file.width} x {file.height} pixels '
                    'in a file that is too small for them'
                )
            image = ImageOps.exif_transpose(file)
            image.load()
    except UnusableFile:
        raise
    except Image.DecompressionBombError as error:
        raise UnusableFile(f'image {quoted(path)} has more pixels than Pillow reads') from error
    except Exception as error:  # Pillow raises anything for a damaged file
        raise UnusableFile(f'image {quoted(path)} cannot be read: {reason_of(error)}') from error
    if image.mode in ('I', 'F'):
        raise UnusableFile(
            f'image {str(path)!r} must have 8 or 16 bits per value, got mode {image.mode!r} '
            'of Pillow'
        )
    warnings = []
    if image.mode.startswith('I;16'):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ('1', 'L', 'LA', 'La'):
        warnings.append(GREY)
    if image.has_transparency_data:  # perhaps opaque
        image = image.convert('RGBA')
        if np.asarray(image.getchannel('A')).min() < 255:
            warnings.append(ALPHA)
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
    return np.array(image.convert('RGB')), warnings


def read_image(path: str | Path, num_channels: int) -> tuple[np.ndarray, list[str]]:
    """Return :func:`read_rgb` for three channels, for one a grey image, uint8 [H, W, C]."""
    image, warnings = read_rgb(path)
    if num_channels == 1:
        image = np.asarray(Image.fromarray(image).convert('L'))[..., None]
        if GREY in warnings:
            warnings.remove(GREY)
        else:
            warnings.append(COLOUR)
    return image, warnings
