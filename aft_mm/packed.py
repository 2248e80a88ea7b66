import codecs
import gzip
import lzma
import re
import zlib
from contextlib import suppress
from pathlib import Path

from aft_mm.errors import UserError, quoted

#: Bytes of content per byte of a file. Text compresses 3 to 20 times, zeros 1,000 times.
MAX_RATIO = 100
_READ = {'.gz': 'gzip', '.xz': 'xz'}
_HEAD = 1024  # bytes
_FIRST_BYTES = {
    'gzip': rb'\x1f\x8b\x08',
    'xz': rb'\xfd7zXZ\x00',
    'zip': rb'PK\x03\x04',
    'bzip2': rb'BZh[1-9]1AY&SY',
    'zstd': rb'\x28\xb5\x2f\xfd',
    '7z': rb'7z\xbc\xaf\x27\x1c',
    'rar': rb'Rar!\x1a\x07',
}


def packed_as(path: Path, name: str) -> str | None:
    """Return ``'gzip'`` or ``'xz'`` by the first bytes of a file, else by its suffix; or None.

    Raises:
        UserError: It is packed otherwise, or UTF-16; messages call it `name`.
    """
    with path.open('rb') as file:
        kind = _kind_of(file.read(_HEAD))
    if kind is not None and kind not in _READ.values():
        raise _another_kind(path, name, kind)
    return kind or _READ.get(path.suffix)


def _kind_of(head: bytes) -> str | None:
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        # Sound may begin with the same two bytes, but soon has a lone surrogate.
        with suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder('utf-16')().decode(head)
            return 'UTF-16'
    return next((kind for kind, first in _FIRST_BYTES.items() if re.match(first, head)), None)


def _another_kind(path: Path, name: str, kind: str) -> UserError:
    return UserError(
        f'{name} {quoted(path)} must be plain bytes or text in UTF-8, or packed as gzip or xz, '
        f'got {kind}'
    )


def read_packed(path: Path, most: int, name: str) -> bytes:
    """Return the content of an xz or gzip file, which messages call `name`.

    Raises:
        UserError: The file is damaged, its content is packed again or UTF-16, or has more than
            `most` bytes.
    """
    kind = packed_as(path, name) or 'gzip'
    try:
        with lzma.open(path) if kind == 'xz' else gzip.open(path) as file:
            data = file.read(most + 1)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise UserError(f'{name} {quoted(path)} is not a whole {kind} file: {error}') from error
    if len(data) > most:
        reason = f', {MAX_RATIO} times its size' if most == MAX_RATIO * path.stat().st_size else ''
        raise UserError(
            f'{name} {quoted(path)} must have at most {most:,} bytes when decompressed{reason}, got more'
        )
    if inner := _kind_of(data[:_HEAD]):
        raise _another_kind(path, name, f'{inner} in {kind}')
    return data
