import argparse
import hashlib
import re
import shlex
from collections import OrderedDict
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from aft_mm.checkpoint import load_from_local, write_safetensors
from aft_mm.config.texts import read_table
from aft_mm.errors import UserError, user_errors
from aft_mm.outputs import check_suffix, check_writable, write_whole
from aft_mm.registry import register_safe_loading
from aft_mm.structures import DATASET_META

from .data_licenses import weights_license

META = ('cfg', 'epoch', 'iter', 'seed', 'experiment_name', 'mmengine_version')
WRITERS: dict[str, Callable[[Mapping[str, Any], BinaryIO], None]] = {
    '.safetensors': lambda published, file: write_safetensors(file, published),
    '.pth': lambda published, file: torch.save(dict(published), file),
}


def choose_weights(checkpoint: Mapping, path: str, ema: bool) -> dict[str, Tensor]:
    """Return the trained weights of a checkpoint, or with ``ema`` the averaged ones.

    EMAHook swaps the two when it saves: the averaged weights are in state_dict.
    """
    weights, swapped = checkpoint.get('state_dict'), checkpoint.get('ema_state_dict')
    if not isinstance(weights, Mapping):
        raise UserError(f'{path!r} must hold a state_dict as written by `aft_mm train`')
    if ema and swapped is None:
        raise UserError(f'--ema needs the averaged weights of EMAHook, but {path!r} has none')
    if ema or swapped is None:
        return dict(weights)
    trained = {
        name.removeprefix('module.'): tensor
        for name, tensor in swapped.items()
        if name.startswith('module.')
    }
    return {**weights, **trained}


def run_name(meta: Mapping[str, Any]) -> str:
    """Return the name of the config; mmengine names a run by it and the start time."""
    return re.sub(r'_\d{8}_\d{6}$', '', meta.get('experiment_name', ''))


def publish(
    checkpoint: Mapping,
    path: str,
    ema: bool = False,
    metrics: Mapping[str, float] | None = None,
    license: str | None = None,  # noqa: A002 - as model cards call it
    command: str | None = None,
) -> dict[str, Any]:
    """Return the published content of a training checkpoint.

    `license` and `command` are by default those that the checkpoint and its data give.
    """
    weights = choose_weights(checkpoint, path, ema)
    meta = checkpoint.get('meta') or {}
    if '{{' in str(meta.get('cfg')):  # `aft_mm train` writes none
        raise UserError(
            f'the config in {path!r} must be as written by `aft_mm train`, got one with {{{{, which '
            'mmengine replaces before it executes the text'
        )
    published = {name: meta[name] for name in META if name in meta}
    dataset = meta.get('dataset_meta') or {}
    published['dataset_meta'] = {name: dataset[name] for name in DATASET_META if name in dataset}
    published['license'] = license or weights_license(meta.get('cfg', ''))
    if metrics:
        published['metrics'] = dict(metrics)
    name = run_name(meta)
    hub = checkpoint.get('message_hub') or {}
    command = command or hub.get('runtime_info', {}).get('command')
    if command or name:
        published['command'] = command or f'aft_mm train {shlex.quote(name)}'
    # Saving a view would save its whole storage.
    state: Any = OrderedDict((name, x.detach().clone()) for name, x in weights.items())
    if hasattr(checkpoint['state_dict'], '_metadata'):  # the versions of the layers
        state._metadata = checkpoint['state_dict']._metadata
    return dict(meta=published, state_dict=state)


def save(published: Mapping, out: Path) -> dict[Path, str]:
    written = {}
    for suffix, write in WRITERS.items():
        content = BytesIO()
        write(published, content)
        digest = hashlib.sha256(content.getbuffer()).hexdigest()
        final = out.with_name(f'{out.stem}-{digest[:8]}{suffix}')
        if final.exists():
            raise UserError(f'{str(final)!r} exists already and was not changed')
        with write_whole(final) as file:
            file.write(content.getbuffer())
        written[final] = digest
    return written


def read_metrics(path: str) -> dict[str, float]:
    metrics = read_table(path)
    if not all(isinstance(value, int | float) for value in metrics.values()):
        raise UserError(f'{path!r} must hold numbers by name as written by `aft_mm test --out`')
    return metrics


def run(args: argparse.Namespace) -> None:
    with user_errors(OSError):
        check_suffix('OUT.pth', args.out, list(WRITERS))
        metrics = read_metrics(args.metrics) if args.metrics else None
        check_writable('OUT.pth', [str(args.out)])
        register_safe_loading()
        checkpoint = load_from_local(args.checkpoint, map_location='cpu')
        published = publish(
            checkpoint, args.checkpoint, args.ema, metrics, args.license, args.command
        )
        for path in save(published, args.out):
            print(path)
