"""The mean of the weights of several checkpoints of a run."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aft_mm.checks import check_int
from aft_mm.errors import UserError

from .latest import checkpoints_in
from .loading import load_from_local


def average(paths: Sequence[str]) -> dict:
    """Return a checkpoint with the mean weights of the files.

    Integers and the random features of a Performer are those of the last iteration.
    """
    total: dict[str, Tensor] = {}
    last: dict[str, Any] = {}
    for path in paths:
        checkpoint = load_from_local(path, 'cpu')
        weights, meta = checkpoint.get('state_dict'), checkpoint.get('meta') or {}
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
        torch.save(average(paths[number - 1 :: -1]), mean)
        yield mean
