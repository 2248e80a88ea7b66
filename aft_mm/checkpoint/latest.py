"""The checkpoints in a work dir: written whole, the newest complete one, and their mean."""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from mmengine.fileio import LocalBackend, register_backend
from torch import Tensor

from aft_mm.checks import check_int
from aft_mm.errors import UserError
from aft_mm.outputs import POINTER, write_whole

from .loading import load_from_local

#: `backend_args` of mmengine for :func:`aft_mm.outputs.write_whole`.
ATOMIC_BACKEND = dict(backend='aft_mm.AtomicFileBackend')


class AtomicFileBackend(LocalBackend):
    def put(self, obj: bytes, filepath: str | Path) -> None:
        Path(filepath).parent.mkdir(parents=True, exist_ok=True)
        with write_whole(filepath) as file:
            file.write(obj)


register_backend(ATOMIC_BACKEND['backend'], AtomicFileBackend, force=True)


#: Content of ``last_checkpoint`` until a new run in a used work dir writes its first one.
NO_CHECKPOINT = 'none'
# The best weights are saved without optimizer.
_NAME = re.compile(r'(?!best_)(\w*_)(\d+)\.pth')


def save_whole(content: Any, path: str | Path) -> None:
    """Save with torch, whole or not at all.

    Raises:
        OSError: `path` cannot be written; torch would raise a RuntimeError without its name.
    """
    buffer = BytesIO()
    torch.save(content, buffer)
    with write_whole(path) as file:
        file.write(buffer.getbuffer())


def remove_parts(folder: str | Path) -> None:
    """Remove temporary files whose writer was killed."""
    for pattern in ('.*.pth.*.part', f'.{POINTER}.*.part'):
        for part in Path(folder).glob(pattern):
            part.unlink(missing_ok=True)


def write_pointer(folder: str | Path, checkpoint: str) -> None:
    with write_whole(Path(folder, POINTER)) as file:
        file.write(checkpoint.encode())


def disown_checkpoints(folder: str | Path) -> None:
    """Note that a new run begins in a work dir with checkpoints of an earlier one."""
    if Path(folder, POINTER).exists() or checkpoints_in(folder):
        write_pointer(folder, NO_CHECKPOINT)


def checkpoints_in(folder: str | Path) -> list[Path]:
    """Return the checkpoints of a run, sorted by name and number, newest first."""
    checkpoints = [
        (match.group(1), int(match.group(2)), path)
        for path in Path(folder).glob('*.pth')
        if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(checkpoints, reverse=True)]


def latest_checkpoint(folder: str | Path) -> tuple[str | None, str]:
    """Find the checkpoint from which a run in ``folder`` resumes, the newest complete one.

    A copied or renamed folder resumes from its own files.

    Returns:
        Its path or None, and a warning if ``last_checkpoint`` names another one, else ''.

    Raises:
        UserError: There are checkpoints, but all are damaged.
    """
    pointer = Path(folder, POINTER)
    why = f'{str(pointer)!r} is missing'
    if pointer.exists():
        try:
            named = pointer.read_text().strip()
            if named == NO_CHECKPOINT:
                return None, ''
            if named:
                copy, path = Path(folder, Path(named).name), Path(named)
                # Not `out_dir` of a checkpoint hook, which has no such file.
                if copy.is_file() and (not path.is_file() or (path.parent / POINTER).exists()):
                    named = str(copy)
                num_iterations(named)
                return named, ''
            why = f'{str(pointer)!r} is empty'
        except (OSError, ValueError, UnpicklingError) as error:
            why = f'the checkpoint named by {str(pointer)!r} cannot be used ({error})'
    complete: dict[str, tuple[int, str]] = {}  # the newest by the beginning of the name
    others = checkpoints_in(folder)
    for path in others:
        kind = path.name.rpartition('_')[0]
        if kind not in complete:
            with suppress(OSError, UnpicklingError):
                complete[kind] = num_iterations(path), str(path)
    if complete:
        _, best = max(complete.values(), key=lambda entry: entry[0])
        return best, f'{why}; the run resumes from {best!r}, the newest complete checkpoint'
    if others or pointer.exists():
        raise UserError(
            f'--resume finds no complete checkpoint in {str(folder)!r}: {why}, and no other there '
            'is complete; name one with --resume CHECKPOINT, or train without --resume in another '
            '--work-dir'
        )
    return None, ''


def num_iterations(path: str | Path) -> int:
    """Read a training checkpoint completely and return its iteration; raises as load_from_local."""
    checkpoint = load_from_local(str(path))
    done = checkpoint.get('meta', {}).get('iter')
    if 'optimizer' not in checkpoint or type(done) is not int:
        raise UnpicklingError(f'checkpoint {str(path)!r} holds no optimizer state')
    return done


def average(paths: Sequence[str], of_one_run: bool = False) -> dict:
    """Return a checkpoint with the mean weights of the files.

    Integers and the random features of a Performer are those of the last iteration.

    Raises:
        UserError: The files are of models of other shapes, or not of one run, by their seeds.
    """
    total: dict[str, Tensor] = {}
    last: dict[str, Any] = {}
    for path in paths:
        checkpoint = load_from_local(path, 'cpu')
        weights, meta = checkpoint.get('state_dict'), checkpoint.get('meta') or {}
        if of_one_run and last and meta.get('seed') != last['meta'].get('seed'):
            raise UserError(
                f'{path!r} must be of the run of {paths[0]!r}, got another seed '
                f'({meta.get("seed")} and {last["meta"].get("seed")})'
            )
        if not last or meta.get('iter', 0) >= last['meta'].get('iter', 0):
            last = dict(meta=meta, state_dict=weights)
        if not isinstance(weights, Mapping):
            raise UserError(f'{path!r} must have a state_dict, as `aft_mm train` writes it')
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        if total and shapes != {name: tensor.shape for name, tensor in total.items()}:
            raise UserError(f'{path!r} must have the weights of {paths[0]!r}, got another model')
        for name, tensor in weights.items():
            total[name] = total[name] + tensor.double() if name in total else tensor.double()
    weights = last['state_dict']
    mean = {
        name: (total[name] / len(paths)).to(tensor.dtype) if _has_mean(name, weights) else tensor
        for name, tensor in weights.items()
    }
    return dict(meta={**last['meta'], 'averaged': len(paths)}, state_dict=mean)


def _has_mean(name: str, weights: Mapping[str, Tensor]) -> bool:
    # The mean of features that were sampled again would be too small.
    module, _, last = name.rpartition('.')
    sampled = last == 'projection' and (f'{module}.seed' if module else 'seed') in weights
    return weights[name].is_floating_point() and not sampled


@contextmanager
def averaged(path: str, number: int) -> Iterator[str]:
    """Yield the path of a temporary checkpoint, the mean of `path` and the `number` − 1 before it.

    Raises:
        UserError: There are fewer checkpoints of this kind in the folder.
        ValueError: `number` is not 1 or larger.
    """
    check_int('--average', number, 1)
    if number == 1:
        yield path
        return
    last = Path(path)
    kind = last.stem.rstrip('0123456789')
    same = [p for p in checkpoints_in(last.parent) if p.stem.rstrip('0123456789') == kind]
    # Newest first.
    paths = list(map(str, same[same.index(last) :])) if last in same else []
    if len(paths) < number:
        raise UserError(
            f'--average must be at most the {len(paths)} numbered checkpoints up to {path!r}, '
            f'got {number}'
        )
    with tempfile.TemporaryDirectory() as folder:
        mean = str(Path(folder) / f'{Path(path).stem}_average_{number}.pth')
        torch.save(average(paths[number - 1 :: -1], of_one_run=True), mean)
        yield mean
