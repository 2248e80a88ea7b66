"""Output files of commands: their suffix, whether they can be written, their names."""

import os
from collections.abc import Sequence
from pathlib import Path

from aft_mm.errors import UserError

#: File formats of matplotlib, and the highest resolution.
PICTURES = ('.png', '.pdf', '.svg', '.jpg')
MAX_DPI = 2400


def check_writable(name: str, paths: Sequence[str]) -> None:
    """Check that files can be written; create their folders, and raise a UserError with `name`."""
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


def check_output(name: str, path: str | os.PathLike, suffixes: Sequence[str]) -> None:
    """Raise a UserError unless an output file has one of the suffixes and can be written."""
    check_suffix(name, path, suffixes)
    check_writable(name, [os.fspath(path)])


def numbered(path: str, num: int) -> list[str]:
    """Return ``path`` for one file, else ``a-1.png``, ``a-2.png``, …."""
    stem, suffix = os.path.splitext(path)
    return [path] if num == 1 else [f'{stem}-{i + 1}{suffix}' for i in range(num)]
