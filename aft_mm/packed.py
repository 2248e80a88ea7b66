import gzip
import lzma
import zlib
from pathlib import Path

from aft_mm.errors import UserError, quoted

#: Bytes of content per byte of a file. Text compresses 3 to 20 times, zeros 1,000 times.
MAX_RATIO = 100


def read_packed(path: Path, most: int, name: str) -> bytes:
    """Return the content of an .xz or gzip file, which messages call `name`.

    Raises:
        UserError: The file is damaged, or its content has more than `most` bytes.
    """
    is_xz = path.suffix == '.xz'
    kind = 'xz' if is_xz else 'gzip'
    try:
        with lzma.open(path) if is_xz else gzip.open(path) as file:
            data = file.read(most + 1)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise UserError(f'{name} {quoted(path)} is not a whole {kind} file: {error}') from error
    if len(data) > most:
        reason = f', {MAX_RATIO} times its size' if most == MAX_RATIO * path.stat().st_size else ''
        raise UserError(
            f'{name} {quoted(path)} must have at most {most:,} bytes when decompressed{reason}, got more'
        )
    return data
