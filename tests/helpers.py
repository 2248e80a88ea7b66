"""Functions that repeat tests, load scripts, read what commands write, and find a free port."""

import functools
import importlib.util
import inspect
import json
import socket
import subprocess
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from aft_mm.cli.main import main

ROOT = Path(__file__).parents[1]
#: Options of a run that loads its data in its own process.
WITHOUT_WORKERS = [
    f'{part}_dataloader.{key}'
    for part in ('train', 'val')
    for key in ('num_workers=0', 'persistent_workers=False')
]


def each(names: str, values: Iterable) -> Callable:
    """Call a test for each value of an argument or of several, as one test; its error says which.

    Like ``pytest.mark.parametrize``, without the time that pytest takes for each case. Each call
    starts with seed 0.
    """
    keys, values = names.split(', '), list(values)
    assert values

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args, **others):
            for value in values:
                cell = dict(zip(keys, value if len(keys) > 1 else [value], strict=True))
                torch.manual_seed(0)
                try:
                    test(*args, **cell, **others)
                except Exception as error:
                    error.add_note(f'in the case {cell}')
                    raise

        parameters = inspect.signature(test).parameters
        kept = [parameter for name, parameter in parameters.items() if name not in keys]
        run.__signature__ = inspect.Signature(kept)
        return run

    return decorate


def nightly(values: Iterable, chosen: Collection | Callable[..., bool] | None = None) -> list:
    """Return values of a parameter, of which `make test` leaves out all or the chosen ones."""

    def tuples(values):
        return [value if isinstance(value, tuple) else (value,) for value in values]

    cases, is_chosen = tuples(values), chosen
    if not callable(chosen):
        names = cases if chosen is None else tuples(chosen)
        assert all(name in cases for name in names), (names, cases)
        is_chosen = lambda *case: case in names  # noqa: E731
    marks = [[pytest.mark.nightly] * bool(is_chosen(*case)) for case in cases]
    assert chosen is None or [] in marks and any(marks), (cases, chosen)
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


class OperatorLog(TorchDispatchMode):
    """The names of the operators that are dispatched, in order."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called.append(function.name())
        return function(*args, **(kwargs or {}))


def load_script(path: str) -> ModuleType:
    """Return a Python file of the repository as a module; `path` has no suffix."""
    spec = importlib.util.spec_from_file_location(Path(path).name, ROOT / f'{path}.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(name: str) -> Callable[[Iterable], None]:
    """Return ``aft_mm NAME`` as a function of the words that follow it."""
    return lambda words: main([*name.split(), *map(str, words)])


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


def save_picture(path: str | Path, pixels: np.ndarray) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def losses(work_dir: str | Path, rank: int = 0) -> dict[int, float]:
    """Return {iteration: loss}, the last value of repeated iterations."""
    lines = Path(work_dir, f'loss_{rank}.jsonl').read_text().splitlines()
    return dict(map(json.loads, lines))


def short(value) -> str:
    """Return the name of a test case that is equal in every process, as xdist requires."""
    if isinstance(value, torch.Tensor):
        return f'{value.dtype} {list(value.shape)}'
    if isinstance(value, dict):
        return ', '.join(f'{name}={short(item)}' for name, item in value.items())[:50]
    if callable(value):
        return value.__name__
    return str(value)[:50]


def drop(module: torch.nn.Module, inputs: tuple, outputs: Any) -> Any:
    """Drop half of the outputs of a module in training, as its forward hook."""
    if isinstance(outputs, tuple | list):
        return type(outputs)(drop(module, inputs, one) for one in outputs)
    return torch.nn.functional.dropout(outputs, 0.5, module.training)
