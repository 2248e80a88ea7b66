"""Image files of a folder, without importing torch."""

import os
from pathlib import Path

from aft_mm.errors import UserError

#: Endings of the image files that are read.
IMAGE_SUFFIXES = ('.bmp', '.jpeg', '.jpg', '.pgm', '.png', '.ppm', '.tif', '.tiff', '.webp')
#: Their formats for Pillow, which reads EPS with Ghostscript, a program that runs the file.
IMAGE_FORMATS = ('BMP', 'DIB', 'GIF', 'JPEG', 'PNG', 'PPM', 'TIFF', 'WEBP')


def list_images(root: Path) -> list[str]:
    """Return the image files below a folder, relative to it and sorted, without hidden ones."""
    found = []
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
            found.append(os.path.relpath(path, root))
    return sorted(found)


def check_name(path: str) -> None:
    """Refuse a name that a list of files in UTF-8 cannot hold."""
    if '\n' in path or '\r' in path:
        raise UserError(f'image {path!r} must have a name without a line break')
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(f'image {path!r} must have a name in UTF-8') from None
