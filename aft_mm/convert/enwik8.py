import argparse
import gzip
import struct
import zipfile
import zlib
from pathlib import Path

from aft_mm.errors import UserError, user_errors
from aft_mm.outputs import write_whole

METHODS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


def read(path: Path, most: int) -> bytes:
    """Return the first bytes of enwik8 in an archive, at most this many."""
    if path.suffix == '.gz':
        with gzip.open(path) as unpacked:
            return unpacked.read(most)
    with zipfile.ZipFile(path) as archive:
        # The header of other methods sets the memory that they take.
        if archive.getinfo('enwik8').compress_type not in METHODS:
            raise zipfile.BadZipFile('it is not compressed by deflate')
        try:
            file = archive.open('enwik8')
        except OSError as error:  # the file lies outside of the archive
            raise zipfile.BadZipFile(str(error)) from error
        with file:
            return file.read(most)


def unpack(archive: Path, folder: Path, size: int) -> Path:
    if not archive.is_file():
        raise UserError(f'archive {str(archive)!r} does not exist')
    if archive.suffix not in ('.gz', '.zip'):
        raise UserError(f'the archive must be a .zip or a .gz file, got {str(archive)!r}')
    try:
        content = read(archive, size + 1)
    except (
        *(zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, KeyError),
        *(ValueError, RuntimeError, OverflowError, struct.error),  # of zipfile, for damaged headers
    ) as error:
        reason = ' '.join(str(error).split())
        raise UserError(f'{str(archive)!r} is damaged or holds no enwik8: {reason:.200}') from error
    if len(content) != size:
        found = f'{len(content):,}; for a part of the file use --size {len(content)}'
        held = 'more' if len(content) > size else found
        raise UserError(f'enwik8 must have {size:,} bytes, but {str(archive)!r} holds {held}')
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / 'enwik8'
    with write_whole(target) as out:
        out.write(content)
    return target


def run(args: argparse.Namespace) -> None:
    with user_errors(OSError):
        print(f'written to {unpack(args.archive, args.folder, args.size)}')
