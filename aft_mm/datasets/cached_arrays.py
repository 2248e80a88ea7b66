"""Arrays that are computed once and read from a file afterwards."""

import os
from contextlib import suppress
from pathlib import Path
from zipfile import BadZipFile

import numpy as np


def read_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file of :func:`write_arrays`, None if it is missing or damaged."""
    damage = OSError, ValueError, EOFError, BadZipFile
    with suppress(*damage), path.open('rb') as file, np.load(file) as content:
        return dict(content)
    return None


def write_arrays(path: Path, **arrays: np.ndarray) -> None:
    """Write arrays to a file that replaces ``path`` once it is complete."""
    part = path.with_name(f'{path.stem}.{os.getpid()}.part.npz')  # one per worker
    np.savez(part, **arrays)  # type: ignore[arg-type]
    part.replace(path)
