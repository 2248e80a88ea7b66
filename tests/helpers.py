"""Functions that read what commands have written, and a free port for them."""

import json
import socket
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image


def only_error(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 1 and 'Traceback' not in result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith('Error: ')]
    return line


def free_port() -> int:
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def picture(path: str | Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def losses(work_dir: str | Path, rank: int = 0) -> dict[int, float]:
    """Return {iteration: loss}, the last value of repeated iterations."""
    lines = Path(work_dir, f'loss_{rank}.jsonl').read_text().splitlines()
    return dict(map(json.loads, lines))
