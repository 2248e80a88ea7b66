"""Image files of any kind as RGB."""

import struct
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from .file_dataset import UnusableFile, reason_of

IMAGE_SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.pgm', '.png', '.ppm', '.tif', '.tiff', '.webp')
GREY = 'a grey image is read as three equal channels'
ALPHA = 'a transparent image is laid on white'
# Pixels that any file may have, and pixels per byte of a larger one: a scan of blank paper has
# fewer, an image made of nothing has hundreds.
_SMALL = 2**24
_PIXELS_PER_BYTE = 64
# What Pillow raises on damaged files.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error)


def read_rgb(path: str | Path) -> tuple[np.ndarray, list[str]]:
    """Read an image with Pillow, upright as its EXIF orientation says.

    OpenCV would read a truncated JPEG without complaint and fill the rest with grey. A grey image
    gets three equal channels, 16 bits lose their lower 8; a transparent one is laid on white.

    Returns:
        uint8 [H, W, 3] and the sentences :data:`GREY` and :data:`ALPHA` that apply.

    Raises:
        UnusableFile: the file is missing, damaged or no image, has more pixels than a file of its
            size can mean, or its values have no fixed range.
    """
    try:
        with Image.open(path) as file:
            num_pixels = file.width * file.height
            if num_pixels > max(_SMALL, _PIXELS_PER_BYTE * Path(path).stat().st_size):
                raise UnusableFile(
                    f'image {str(path)!r} has {file.width} x {file.height} pixels '
                    'in a file that is too small for them.'
                )
            image = ImageOps.exif_transpose(file)
            image.load()
    except UnusableFile:
        raise
    except _DAMAGE as error:
        raise UnusableFile(f'image {str(path)!r} cannot be read: {reason_of(error)}.') from error
    except Image.DecompressionBombError as error:
        raise UnusableFile(f'image {str(path)!r} has more pixels than Pillow reads.') from error
    if image.mode in ('I', 'F'):
        raise UnusableFile(
            f'image {str(path)!r} has values of an unknown range (mode '
            f'{image.mode!r} of Pillow); save it with 8 or 16 bits a value.'
        )
    remarks = []
    if image.mode.startswith('I;16'):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ('1', 'L', 'LA', 'La'):
        remarks.append(GREY)
    if image.has_transparency_data:  # which may be opaque all over
        image = image.convert('RGBA')
        if np.asarray(image.getchannel('A')).min() < 255:
            remarks.append(ALPHA)
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
    return np.array(image.convert('RGB')), remarks
