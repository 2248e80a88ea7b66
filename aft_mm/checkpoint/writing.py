"""Files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def write_whole(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes ``path`` when all of it is on the disk, and nothing before.

    Raises:
        OSError: it cannot be written; it names ``path``, and what there was of it is gone.
    """
    path = Path(path)
    part = path.with_name(f'.{path.name}.{os.getpid()}.part')
    try:
        with part.open('wb') as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        if error.errno is not None:  # a full disk does not say which file is too long for it
            error.filename = str(path)
        raise
    finally:
        part.unlink(missing_ok=True)
