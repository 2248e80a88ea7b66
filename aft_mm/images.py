"""Image files: what lists, checks, reads and enlarges them obeys the same rules.

docs/tasks/own_data.md has the formats, bounds and conversions. A format is known by the content, a
listed file also by its suffix; of 16 bits the upper 8 are used; colour profiles are ignored.
"""

import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError, features

from aft_mm.checks import check_regular, counted, described
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
    'find_images',
    'image_size',
    'is_hidden',
    'list_images',
    'not_read',
    'orientation_of',
    'read_image',
    'read_rgb',
    'rgb_of',
    'read_unlike_opencv',
    'stored_size',
    'turned',
    'unread_reason',
]

#: Endings of the image files that are listed whatever they hold.
IMAGE_SUFFIXES = (
    *('.bmp', '.jpeg', '.jpg', '.pgm', '.png', '.ppm', '.tif', '.tiff', '.webp'),
    *('.apng', '.dib', '.gif', '.jfif', '.jpe', '.mpo', '.pbm', '.pnm'),
)
#: Formats for Pillow, which reads EPS with Ghostscript, a program that runs the file.
IMAGE_FORMATS = ('BMP', 'DIB', 'GIF', 'JPEG', 'PNG', 'PPM', 'TIFF', 'WEBP')
# What reads the kinds of pictures for which Pillow needs more, and their format there.
_LIBRARIES = {'AVIF': 'Pillow 11.3 or later', 'HEIC': 'pillow-heif'}
_FORMATS = {'AVIF': 'AVIF', 'HEIC': 'HEIF'}
# Kinds of pictures by their first bytes. A TIFF with another ending may be the raw file of a camera.
_BEGINNINGS = {
    kind: re.compile(beginning, re.DOTALL)
    for kind, beginning in {
        'JPEG': rb'\xff\xd8\xff',
        'PNG': rb'\x89PNG\r\n\x1a\n',
        'GIF': rb'GIF8[79]a',
        'WebP': rb'RIFF.{4}WEBP',
        'BMP': rb'BM.{4}\0{4}.{4}[\x0c(48@l|]\0{3}',
        'TIFF': rb'(II[*+]\0|MM\0[*+])',
        'AVIF': rb'.{4}ftyp(avi[fs]|m(if|sf)1.{4,40}avif)',
        'HEIC': rb'.{4}ftyp(he[iv][cmsx]|m(if|sf)1)',
        'JPEG XL': rb'(\xff\n|\0{3}\x0cJXL )',
        'JPEG 2000': rb'(\0{3}\x0cjP  |\xffO\xffQ)',
        'camera RAW': rb'(FUJIFILMCCD-RAW|II(RO|U\0)|.{4}ftypcrx )',
        'PSD': rb'8BPS',
        'SVG': rb'(\xef\xbb\xbf)?\s*<(\?xml.*<|!--.*<)?svg[\s>]',
        'OpenEXR': rb'v/1\x01',
        'DICOM': rb'.{128}DICM',
    }.items()
}
# Formats that OpenCV reads alike, besides JPEG; of others it lacks some variants.
_ALIKE = ('PNG', 'WEBP')
_READ = ('JPEG', 'PNG', 'GIF', 'WebP', 'BMP')
# Kinds by their endings, for pictures whose first bytes vary.
_KINDS = {
    ending: kind
    for kind, endings in {
        'AVIF': '.avif .avifs',
        'HEIC': '.heic .heics .heif .hif',
        'JPEG XL': '.jxl',
        'JPEG 2000': '.j2c .j2k .jp2 .jpf .jpx',
        'camera RAW': '.3fr .arw .cr2 .cr3 .crw .dcr .dng .erf .fff .iiq .kdc .mef .mos .mrw .nef .nrw .orf '
        '.pef .raf .raw .rw2 .rwl .sr2 .srf .srw .x3f',
        'PSD': '.psb .psd',
        'SVG': '.svg .svgz',
        'OpenEXR': '.exr',
        'DICOM': '.dcm .dicom',
        'TGA': '.tga',
        'ICO': '.ico',
        'XCF': '.xcf',
        'EPS': '.eps',
    }.items()
    for ending in endings.split()
}
# Endings of copies and of unfinished downloads, and of files that are no pictures.
_UNFINISHED = tuple('.bak .crdownload .download .old .orig .part .partial .temp .tmp ~'.split())
_TEXTS = tuple('.csv .html .json .jsonl .md .npy .py .txt .xml .yaml'.split())
# Folders of previews, archives and systems, besides those with a dot.
_HIDDEN = (
    *'#recycle $recycle.bin @eadir __macosx __pycache__ lost+found'.split(),
    'system volume information',
)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
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


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is passed over: ``.thumbnails``, ``__MACOSX``, ``@eaDir``."""
    return name.startswith('.') or name.lower() in _HIDDEN


def list_images(root: Path) -> list[str]:
    """Return the image files below a folder, relative to it and sorted, without hidden ones."""
    return find_images(root)[0]


def find_images(
    root: Path, unread: dict[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Return :func:`list_images`, and the kinds of the pictures that are not read, by their paths.

    Args:
        unread: Gets why folders are passed over, by their paths. Without it such a folder is an error.
    """
    images: list[str] = []
    others: dict[str, str] = {}

    def pass_over(path: str, reason: str) -> None:
        if unread is None:
            raise UserError(f'folder {path!r} {reason}')
        unread[path] = f'folder {path!r} {reason}'

    def refuse(error: OSError) -> None:
        pass_over(error.filename, f'cannot be read: {error.strerror}')

    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if not is_hidden(name))
        for name in [*folders]:
            path = os.path.join(folder, name)
            if os.path.islink(path) and _contains(path, folder):
                pass_over(path, 'is a link to a folder that contains it')
                folders.remove(name)
        inside = '' if os.path.samefile(folder, root) else f'{os.path.relpath(folder, root)}/'
        for name in files:
            if name.startswith('.'):
                continue
            path = os.path.join(folder, name)
            relative = inside + name
            if name.lower().endswith(IMAGE_SUFFIXES):
                check_name(path)
                images.append(relative)
                continue
            kind, is_read = _kind(path)
            if kind:
                check_name(path)
            if is_read:
                images.append(relative)
            elif kind:
                others[relative] = kind
    return sorted(images), dict(sorted(others.items()))


def _contains(link: str, folder: str) -> bool:
    target = os.path.realpath(link)
    return any(
        f'{os.path.realpath(above)}/'.startswith(f'{target}/')
        for above in (folder, *map(str, Path(folder).parents))
    )


def not_read(others: Mapping[str, str], advice: str = '') -> str:
    """Return a message on the files that were found and are not read, '' without.

    Args:
        others: Their kinds by their paths, such as those of :func:`find_images`.
        advice: What to do; by default for pictures.
    """
    if not others:
        return ''
    kinds = Counter(others.values())
    files = counted(len(others), 'file') + (' was' if len(others) == 1 else ' were')
    which = ', '.join(f'{kind} ({number:,})' for kind, number in kinds.most_common())
    return f'{files} not read: {which}, first {next(iter(others))!r}; {advice or _advice(kinds)}'


def unread_reason(path: str, kind: str) -> str:
    """Return why a picture of a kind that a further library reads is not read, '' for other kinds."""
    if kind not in _LIBRARIES:
        return ''
    return f'image {quoted(path)} {_unread(kind)}'


def _unread(kind: str) -> str:
    return f'cannot be read: it is {kind}; {_advice([kind])}'


def _advice(kinds: Collection[str]) -> str:
    missing = [name for kind, name in _LIBRARIES.items() if kind in kinds and not _opens(kind)]
    return ' or '.join([f'install {name}' for name in missing] + ['convert to JPEG or PNG'])


def _kind(path: str) -> tuple[str, bool]:
    ending = os.path.splitext(path)[1].lower()
    if ending in _TEXTS:
        return '', False
    kind = _KINDS.get(ending, '')
    if kind == 'camera RAW':  # its first bytes are those of a TIFF
        return kind, False
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return '', False
        with open(path, 'rb') as file:
            found = _kind_of(file.read(4096))
    except OSError:
        return kind, False
    if found in _READ or found == 'TIFF':
        is_read = found in _READ or not ending
        is_read = is_read and not path.lower().endswith(_UNFINISHED)
        return (found if is_read or not ending else f'{found} as {ending}'), is_read
    kind = found or kind
    return kind, _opens(kind)


def _kind_of(beginning: bytes) -> str:
    return next((kind for kind, first in _BEGINNINGS.items() if first.match(beginning)), '')


@cache
def _opens(kind: str) -> bool:
    if kind == 'AVIF':
        return 'avif' in features.modules and bool(features.check('avif'))
    if kind != 'HEIC' or find_spec('pillow_heif') is None:
        return False
    import_module('pillow_heif').register_heif_opener()
    return True


def check_name(path: str) -> None:
    """Refuse a name that a list of files in UTF-8 cannot hold."""
    if '\n' in path or '\r' in path:
        raise UserError(f'image {path!r} must have a name without a line break')
    try:
        path.encode()
    except UnicodeEncodeError:
        raise UserError(f'image {path!r} must have a name in UTF-8') from None


def check_image(path: str, name: str = 'training') -> None:
    """Raise an :class:`UnusableFile` if :func:`read_rgb` cannot read an image, of the set ``name`` if any.

    A JPEG or PNG that is whole at both ends is not decoded.
    """
    what = f'image {quoted(path)}' + (f' of the {name} set' if name else '')
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
        orientation = orientation_of(image)
        if orientation > 4 and image.format == 'TIFF':  # Pillow gives the size of a turned TIFF
            width, height = height, width
        return width, height, orientation


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of an open image, 1 to 8."""
    if image.format == 'PNG' and 'exif' not in image.info:
        image.load()  # it may follow the pixels
    # Pillow would read it from XMP as well, where OpenCV and most viewers do not.
    for name in ('xmp', 'XML:com.adobe.xmp', 'Raw profile type xmp'):
        image.info.pop(name, None)
    exif = Image.Exif()
    try:
        if image.format in ('JPEG', 'MPO'):  # Pillow has read it already
            exif.load(image.info.get('exif', b''))
        else:
            exif = image.getexif()
        orientation = exif.get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow raises anything for damaged EXIF, which OpenCV ignores
        return 1
    return orientation if orientation in range(1, 9) else 1


def turned(image: Image.Image) -> Image.Image:
    """Return an open image as its EXIF orientation says."""
    method = _TURNS.get(orientation_of(image))
    if method is None or image.format == 'TIFF':  # which Pillow turns
        return image
    return image.transpose(method)


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


def rgb_of(image: np.ndarray | Image.Image) -> tuple[np.ndarray, list[str]]:
    """Return what :func:`read_rgb` returns for a file of this image.

    The orientation in the EXIF data of a PIL image applies, also to one that was turned since:
    ``PIL.ImageOps.exif_transpose`` turns an image and removes it.

    Args:
        image: A PIL image, or an array or tensor uint8 or uint16, [H, W] or [H, W, C] with C = 1,
            2 (grey and alpha), 3 (RGB) or 4 (RGBA).

    Raises:
        UserError: It is another object, or has values without a fixed range.
    """
    is_array = hasattr(image, '__array__') and not isinstance(image, Image.Image)
    array: Any = np.asarray(image) if is_array else np.zeros(0)
    if array.size and array.dtype.str[1:] in ('u1', 'u2'):
        pixels = array[..., 0] if array.shape[2:] == (1,) else array
        if pixels.ndim == 2 or pixels.shape[2:] in ((2,), (3,), (4,)):
            high = (pixels >> 8 * (pixels.itemsize - 1)).astype(np.uint8)
            return _rgb(Image.fromarray(high))
    if not isinstance(image, Image.Image):
        raise UserError(
            'image must be a path, a PIL image or an array uint8 or uint16 [H, W] or [H, W, C], C = 1 '
            f'to 4, got {described(image)}'
        )
    try:
        own = image.copy()  # turning takes entries out of it
        own.format = image.format
        _check_bits(own, 'image')
        return _rgb(own)
    except UserError:
        raise
    except Exception as error:  # Pillow reads late, and fails in many ways
        raise UnusableFile(f'image cannot be read: {reason_of(error)}') from error


def read_image(
    source: str | os.PathLike | np.ndarray | Image.Image, num_channels: int
) -> tuple[np.ndarray, list[str]]:
    """Return the image of a path, an array or a PIL image, uint8 [H, W, C], and warnings.

    Of three channels it is that of :func:`read_rgb`, of one a grey image.
    """
    if isinstance(source, str | os.PathLike):
        image, warnings = read_rgb(source)
    else:
        image, warnings = rgb_of(source)
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
            differs = image.format not in _ALIKE or image.has_transparency_data
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
    kind = ''
    try:
        with source if isinstance(source, BytesIO) else _open(source) as file:
            num_bytes = file.seek(0, os.SEEK_END)
            if not num_bytes:
                raise UnusableFile(f'{what} is empty')
            file.seek(0)
            kind = _kind_of(file.read(4096))
            formats = (_FORMATS[kind],) if _opens(kind) else IMAGE_FORMATS
            # By its path, Pillow garbles a turned TIFF without compression.
            with Image.open(file, formats=formats) as image:
                width, height = image.size
                if width * height > max(_PIXELS, _PIXELS_PER_BYTE * num_bytes):
                    raise UnusableFile(
                        f'{what} has {width} x {height} pixels in a file that is too small for them'
                    )
                _check_bits(image, what)
                yield image
    except UnusableFile:
        raise
    except Image.DecompressionBombError as error:
        raise UnusableFile(f'{what} has more pixels than Pillow reads') from error
    except Exception as error:  # Pillow raises anything for a damaged file
        reason = reason_of(error)
        problem = damaged if reason == DAMAGED else f'cannot be read: {reason}'
        if isinstance(error, UnidentifiedImageError) and kind not in ('', 'TIFF', *_READ):
            problem = _unread(kind)
        raise UnusableFile(f'{what} {problem}') from error


def _check_bits(image: Image.Image, what: str) -> None:
    if image.mode in ('I', 'F') and not _has_16_bits(image):
        raise UnusableFile(
            f'{what} has values of 32 bits and unknown range; save it with 8 or 16 bits per value'
        )


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode.startswith('I') and image.format in ('PNG', 'PPM') or ';16' in image.mode


def _rgb(image: Image.Image) -> tuple[np.ndarray, list[str]]:
    has_16_bits = _has_16_bits(image)
    image = turned(image)
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
        size: Height and width of the result [px].
    """
    height, width = size
    planes = [
        np.asarray(Image.fromarray(plane).resize((width, height), Image.Resampling.BICUBIC))
        for plane in np.moveaxis(image, -1, 0)
    ]
    return np.stack(planes, axis=-1)
