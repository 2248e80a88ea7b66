"""Image files: what lists, checks, reads and enlarges them obeys the same rules.

- Formats: BMP, GIF, JPEG, PNG, PPM, TIFF and WebP, known by their content. Of several frames or pages
  the first is read.
- Bounds: 2^26 pixels, or 64 per byte of the file up to the 179 million of Pillow. A white page of few
  bytes is read, a decompression bomb is not.
- Values: 8 bits, of 16 the upper 8. Values of 32 bits have no fixed range and are refused.
- Colours: palettes, CMYK and grey become RGB; profiles are ignored.
- Orientation: the image is turned as its EXIF says.
- Transparency: the image is laid on white.

mmcv reads the images of classification, detection and segmentation with OpenCV, whose values of a JPEG
differ by 1 at most; :mod:`aft_mm.hosts` passes it the files that OpenCV reads in another way.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from aft_mm.checks import check_regular
from aft_mm.errors import DAMAGED, UnusableFile, UserError, quoted, reason_of

__all__ = [
    'ALPHA',
    'COLOUR',
    'GREY',
    'IMAGE_FORMATS',
    'IMAGE_SUFFIXES',
    'check_image',
    'check_name',
    'enlarge_bicubic',
    'image_size',
    'list_images',
    'read_image',
    'read_rgb',
    'read_unlike_opencv',
    'stored_size',
]

#: Endings of the image files that are listed.
IMAGE_SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.pgm', '.png', '.ppm', '.tif', '.tiff', '.webp')
#: Formats for Pillow, which reads EPS with Ghostscript, a program that runs the file.
IMAGE_FORMATS = ('BMP', 'DIB', 'GIF', 'JPEG', 'PNG', 'PPM', 'TIFF', 'WEBP')
# Warnings.
GREY = 'a grey image is read as three equal channels'
COLOUR = 'a colour image is converted to grey'
ALPHA = 'a transparent image is laid on white'
_JPEG = b'\xff\xd8'
# Last bytes of a complete file by its first: JPEG's marker, PNG's chunk.
_ENDS: Mapping[bytes, bytes] = {_JPEG: b'\xff\xd9', b'\x89PNG': b'IEND\xaeB`\x82'}
# A white PNG has 300 pixels per byte, a bomb thousands.
_PIXELS = 2**26
_PIXELS_PER_BYTE = 64


def list_images(root: Path) -> list[str]:
    """Return the image files below a folder, relative to it and sorted, without hidden ones."""
    images = []
    for folder, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        for name in folders:
            path = os.path.join(folder, name)
            if os.path.islink(path) and f'{real}/'.startswith(f'{os.path.realpath(path)}/'):
                raise UserError(f'folder {path!r} is a link to a folder that contains it')
        folders[:] = sorted(name for name in folders if not name.startswith('.'))
        for name in files:
            path = os.path.join(folder, name)
            if name.startswith('.') or not name.lower().endswith(IMAGE_SUFFIXES):
                continue
            check_name(path)
            if not os.path.isfile(path):
                raise UserError(f'image {path!r} is not a file, or is a link to a missing one')
            images.append(os.path.relpath(path, root))
    return sorted(images)


def check_name(path: str) -> None:
    """Refuse a name that a list of files in UTF-8 cannot hold."""
    if '\n' in path or '\r' in path:
        raise UserError(f'image {path!r} must have a name without a line break')
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(f'image {path!r} must have a name in UTF-8') from None


def check_image(path: str, name: str = 'training') -> None:
    """Raise an :class:`UnusableFile` if :func:`read_rgb` cannot read an image of the set ``name``.

    A JPEG or PNG that is whole at both ends is not decoded.
    """
    what = f'image {quoted(path)} of the {name} set'
    with _opened(path, what, 'is truncated, not an image or damaged') as image:
        if not _has_end(path):
            image.load()


def _has_end(path: str) -> bool:
    with open(path, 'rb') as file:
        start = file.read(8)
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        tail = file.read().rstrip(b'\0')
    return any(start.startswith(magic) and tail.endswith(end) for magic, end in _ENDS.items())


def image_size(path: str | os.PathLike) -> tuple[int, int]:
    """Return the width and height of an image as :func:`read_rgb` turns it, without decoding it."""
    width, height, orientation = stored_size(path)
    return (height, width) if orientation > 4 else (width, height)


def stored_size(path: str | os.PathLike) -> tuple[int, int, int]:
    """Return the width and height of the stored pixels of an image, and its EXIF orientation, 1 to 8."""
    with _opened(path, f'image {quoted(path)}') as image:
        width, height = image.size
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        if orientation not in range(1, 9):
            orientation = 1
        if orientation > 4 and image.format == 'TIFF':  # Pillow gives the size of a turned TIFF
            width, height = height, width
        return width, height, orientation


def read_rgb(path: str | os.PathLike) -> tuple[np.ndarray, list[str]]:
    """Read an image.

    Returns:
        The image, uint8 [H, W, 3], and the warnings :data:`GREY` and :data:`ALPHA` that apply.

    Raises:
        UnusableFile: If the file is missing, damaged, not an image, a decompression bomb, or has
            values without a fixed range.
    """
    with _opened(path, f'image {quoted(path)}') as image:
        return _rgb(image)


def read_image(path: str | os.PathLike, num_channels: int) -> tuple[np.ndarray, list[str]]:
    """Return :func:`read_rgb` for three channels, for one a grey image, uint8 [H, W, C]."""
    image, warnings = read_rgb(path)
    if num_channels == 1:
        image = np.asarray(Image.fromarray(image).convert('L'))[..., None]
        if GREY in warnings:
            warnings.remove(GREY)
        else:
            warnings.append(COLOUR)
    return image, warnings


def read_unlike_opencv(content: bytes) -> np.ndarray | None:
    """Read the bytes of an image file as :func:`read_rgb`, or return None if OpenCV gives the same."""
    if content.startswith(_JPEG):
        return None
    try:
        with _opened(BytesIO(content), 'an image') as image:
            differs = image.has_transparency_data or image.mode == 'LAB'
            return _rgb(image)[0] if differs else None
    except UnusableFile as error:
        if isinstance(error.__cause__, UnidentifiedImageError):
            return None
        raise


def _open(path: str | os.PathLike) -> BinaryIO:
    check_regular(path)
    return open(path, 'rb')


@contextmanager
def _opened(
    source: str | os.PathLike | BytesIO, what: str, damaged: str = f'cannot be read: {DAMAGED}'
) -> Iterator[Image.Image]:
    """Open an image; an error, also one inside of the block, becomes an UnusableFile."""
    try:
        with source if isinstance(source, BytesIO) else _open(source) as file:
            num_bytes = file.seek(0, os.SEEK_END)
            if not num_bytes:
                raise UnusableFile(f'{what} is empty')
            # By its path, Pillow garbles a turned TIFF without compression.
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                width, height = image.size
                if width * height > max(_PIXELS, _PIXELS_PER_BYTE * num_bytes):
                    raise UnusableFile(
                        f'{what} has {width} x {height} pixels in a file that is too small for them'
                    )
                if image.mode in ('I', 'F') and not _has_16_bits(image):
                    raise UnusableFile(
                        f'{what} has values of 32 bits and unknown range; save it with 8 or 16 '
                        'bits per value'
                    )
                yield image
    except UnusableFile:
        raise
    except Image.DecompressionBombError as error:
        raise UnusableFile(f'{what} has more pixels than Pillow reads') from error
    except Exception as error:  # Pillow raises anything for a damaged file
        reason = reason_of(error)
        problem = damaged if reason == DAMAGED else f'cannot be read: {reason}'
        raise UnusableFile(f'{what} {problem}') from error


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode.startswith('I') and image.format in ('PNG', 'PPM') or ';16' in image.mode


def _rgb(image: Image.Image) -> tuple[np.ndarray, list[str]]:
    has_16_bits = _has_16_bits(image)
    image = ImageOps.exif_transpose(image)
    if has_16_bits:
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    warnings = []
    if image.mode in ('1', 'L', 'LA', 'La'):
        warnings.append(GREY)
    if image.has_transparency_data:  # perhaps opaque
        image = image.convert('RGBA')
        if np.asarray(image.getchannel('A')).min() < 255:
            warnings.append(ALPHA)
        image = Image.alpha_composite(Image.new('RGBA', image.size, 'white'), image)
    return np.array(image.convert('RGB')), warnings


def enlarge_bicubic(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Enlarge uint8 [h, w, C], C = 1 or 3, to uint8 [H, W, C] by Pillow's bicubic interpolation.

    Args:
        image: uint8 [h, w, C], C = 1 or 3.
        size: Height and width of the result [px].
    """
    height, width = size
    planes = [
        np.asarray(Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC))
        for plane in np.moveaxis(image, -1, 0)
    ]
    return np.stack(planes, axis=-1)
