"""Files that appear only when they are complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mmengine.fileio import LocalBackend, register_backend

#: `backend_args` of mmengine for :func:`write_whole`.
ATOMIC_BACKEND = dict(backend='aft_mm.AtomicFileBackend')

_DESCRIPTORS = '/proc/self/fd'


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


class AtomicFileBackend(LocalBackend):
    def put(self, obj: bytes, filepath: str | Path) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        with write_whole(filepath) as file:
            file.write(obj)


register_backend(ATOMIC_BACKEND['backend'], AtomicFileBackend, force=True)
