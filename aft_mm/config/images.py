"""Check that an image file is complete, without importing torch."""

import os
from collections.abc import Mapping

from PIL import Image

from aft_mm.errors import UserError
from aft_mm.image_paths import IMAGE_FORMATS

# Last bytes of a complete file by its first: JPEG's marker, PNG's chunk.
_ENDS: Mapping[bytes, bytes] = {
    b'\xff\xd8': b'\xff\xd9',
    b'\x89PNG': b'IEND\xaeB`\x82',
}
# Pillow's errors for damaged files, other files, and too many pixels.
_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, Image.DecompressionBombError)


def check_image(path: str, name: str = 'training') -> None:
    """Raise a :class:`UserError` if an image of the set ``name`` cannot be read completely."""
    what = f'image {path!r} of the {name} set'
    try:
        with open(path, 'rb') as file:
            start = file.read(8)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 4096))
            tail = file.read().rstrip(b'\0')
    except OSError as error:
        raise UserError(f'{what} cannot be read: {error}') from error
    if size == 0:
        raise UserError(f'{what} is empty')
    end = next((_ENDS[magic] for magic in _ENDS if start.startswith(magic)), None)
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            mode = image.mode
            if end is None or not tail.endswith(end):
                image.load()
    except _DAMAGE as error:
        raise UserError(
            f'{what} is truncated, not an image or has too many pixels: {error}'
        ) from error
    if mode in ('I', 'F'):
        raise UserError(
            f'{what} has values of 32 bits and unknown range; save it with 8 or 16 bits per value'
        )
