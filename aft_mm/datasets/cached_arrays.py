"""Arrays that are computed once and read from a file afterwards."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np


def read_arrays(path: Path, *names: str) -> list[np.ndarray] | None:
    """Return arrays of a file of :func:`write_arrays`, None if it is missing or damaged."""
    # numpy and zipfile raise anything for changed bytes.
    with suppress(Exception), path.open('rb') as file, np.load(file) as content:
        return [content[name] for name in names]
    return None


def write_arrays(path: Path, **arrays: np.ndarray) -> None:
    part = path.with_name(f'{path.stem}.{os.getpid()}.part.npz')  # one per worker
    np.savez(part, **arrays)  # type: ignore[arg-type]
    part.replace(path)
