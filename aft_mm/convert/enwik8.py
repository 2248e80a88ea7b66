import argparse
import gzip
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from aft_mm.errors import UserError, user_errors
from aft_mm.outputs import write_whole

METHODS = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


@contextmanager
def open_archive(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    if path.suffix == '.zip':
        with zipfile.ZipFile(path) as archive:
            # The header of other methods sets the memory that they take.
            if archive.getinfo('enwik8').compress_type not in METHODS:
                raise zipfile.BadZipFile('it is not compressed by deflate')
            try:
                file = archive.open('enwik8')
            except OSError as error:  # the file lies outside of the archive
                raise zipfile.BadZipFile(str(error)) from error
            with file:
                yield file
    elif path.suffix == '.gz':
        with gzip.open(path) as unpacked:
            yield unpacked
    else:
        raise UserError(f'the archive must be a .zip or a .gz file, got {str(path)!r}')


def unpack(archive: Path, folder: Path, size: int) -> Path:
    if not archive.is_file():
        raise UserError(f'archive {str(archive)!r} does not exist')
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / 'enwik8'
    try:
        with open_archive(archive) as source, write_whole(target) as out:
            content = source.read(size + 1)
            if len(content) > size:
                raise UserError(f'enwik8 must have {size:,} bytes, but {str(archive)!r} holds more')
            if len(content) < size:
                raise UserError(
                    f'enwik8 must have {size:,} bytes, but {str(archive)!r} holds '
                    f'{len(content):,}; for a part of the file use --size {len(content)}'
                )
            out.write(content)
    except UserError:
        raise
    except (
        *(zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, KeyError),
        *(ValueError, RuntimeError, OverflowError, struct.error),  # of zipfile, for damaged headers
    ) as error:
        reason = ' '.join(str(error).split())
        raise UserError(f'{str(archive)!r} is damaged or holds no enwik8: {reason:.200}') from error
    return target


def run(args: argparse.Namespace) -> None:
    with user_errors(OSError):
        print(f'written to {unpack(args.archive, args.folder, args.size)}')
