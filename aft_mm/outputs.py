import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from aft_mm.errors import UserError

#: File formats of matplotlib, and the highest resolution.
PICTURES = ('.png', '.pdf', '.svg', '.jpg')
MAX_DPI = 2400
#: Text file in a work dir, which names the newest checkpoint.
POINTER = 'last_checkpoint'
_DESCRIPTORS = '/proc/self/fd'


def check_kept(name: str, paths: Iterable[str | Path], reads: Iterable[str | Path]) -> None:
    """Raise a UserError if an output file is one of the files, or in a folder, that a command reads."""
    sources = list(map(Path, filter(os.path.exists, reads)))
    for path in map(Path, filter(os.path.isfile, paths)):
        for source in sources:
            if path.samefile(source) or source.resolve() in path.resolve().parents:
                where = f'in the folder {str(source)!r}' if source.is_dir() else 'a file'
                raise UserError(
                    f'{name} must not replace data, got {str(path)!r}, {where} that the command reads'
                )


def check_writable(name: str, paths: Sequence[str], reads: Iterable[str | Path] = ()) -> None:
    """Check that files can be written, and :func:`check_kept`; create folders, raise a UserError."""
    check_kept(name, paths, reads)
    for path in map(Path, paths):
        try:
            existed = path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open('ab').close()
            if not existed:
                path.unlink(missing_ok=True)  # another process may be first
        except OSError as error:
            raise UserError(f'{name} {str(path)!r} cannot be written: {error.strerror}') from error


def check_suffix(name: str, path: str | os.PathLike, suffixes: Sequence[str]) -> None:
    if Path(path).suffix not in suffixes:
        raise UserError(f'{name} must end in {" or ".join(suffixes)}, got {os.fspath(path)!r}')


def check_output(
    name: str, path: str | os.PathLike, suffixes: Sequence[str], reads: Iterable[str | Path] = ()
) -> None:
    """Raise a UserError unless an output file has one of the suffixes and can be written."""
    check_suffix(name, path, suffixes)
    check_writable(name, [os.fspath(path)], reads)


def numbered(path: str, num: int) -> list[str]:
    """Return ``path`` for one file, else ``a-1.png``, ``a-2.png``, …."""
    stem, suffix = os.path.splitext(path)
    return [path] if num == 1 else [f'{stem}-{i + 1}{suffix}' for i in range(num)]


@contextmanager
def write_whole(path: str | Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces ``path`` once it is complete and on the disk.

    Until then it has no name, where the file system can, so that a killed process leaves nothing.

    Raises:
        OSError: ``path`` cannot be written; the temporary file is removed.
    """
    path = Path(path)
    part = path.with_name(f'.{path.name}.{os.getpid()}.part')
    try:
        with _open_nameless(part) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if not part.exists():
                # A folder's descriptor, not used here, makes Python follow the link of /proc.
                os.link(f'{_DESCRIPTORS}/{file.fileno()}', part, src_dir_fd=0)
        os.replace(part, path)
    except OSError as error:
        if error.errno is not None:  # the error of a full disk names no file
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)


def _open_nameless(part: Path) -> BinaryIO:
    part.unlink(missing_ok=True)  # of a killed process of the same number
    try:
        if not os.path.isdir(_DESCRIPTORS):
            raise NotADirectoryError
        return open(os.open(part.parent, os.O_TMPFILE | os.O_WRONLY, 0o666), 'wb')
    except OSError:
        return part.open('wb')
