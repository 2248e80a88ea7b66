"""Functions that load scripts, read what commands have written, and find a free port for them."""

import importlib.util
import json
import socket
import subprocess
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]


def load_script(path: str) -> ModuleType:
    """Return a Python file of the repository as a module; `path` has no suffix."""
    spec = importlib.util.spec_from_file_location(Path(path).name, ROOT / f'{path}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
