"""Make a checkpoint of training ready to be given away: weights, classes and the config's text.

Optimizer, schedules, log and the state of the run stay behind; what the metrics were, the licence
and the command that made the weights come along. Two files are written that hold the same,
OUT-0123abcd.safetensors and OUT-4567cdef.pth, each with the first 8 digits of its sha256 in its
name, where torch.hub and aft_mm check them. Neither needs code to be read.
"""

import argparse
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aft_mm.cli.arguments import check_writable
from aft_mm.errors import UserError, user_errors

LICENSE = 'Apache-2.0'


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('checkpoint', metavar='IN.pth', help='as tools/train.py writes it')
    parser.add_argument(
        'out', metavar='OUT.pth', type=Path, help='becomes OUT-<8 digits>, of both kinds'
    )
    parser.add_argument(
        '--ema', action='store_true', help='the weights that EMAHook averaged instead of the last'
    )
    parser.add_argument('--metrics', metavar='JSON', help='what tools/test.py --out wrote of them')
    parser.add_argument('--license', default=LICENSE, help='of the weights; %(default)s')
    parser.add_argument(
        '--command', help='what made them; by default the training of the config in the file'
    )
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import torch
from torch import Tensor

from aft_mm.checkpoint import load_from_local, write_safetensors
from aft_mm.config.reading import check_checkpoint
from aft_mm.registry import register_safe_loading

# What mmengine writes into meta and a reader of the weights has a use for.
META = ('cfg', 'epoch', 'iter', 'experiment_name', 'mmengine_version')
DATASET_META = ('classes', 'palette')
#: The files that are written, by their endings.
WRITERS = {
    '.safetensors': lambda published, file: write_safetensors(file, published),
    '.pth': lambda published, file: torch.save(dict(published), file),
}


def choose_weights(checkpoint: Mapping, path: str, ema: bool) -> dict[str, Tensor]:
    """The weights of a checkpoint, with `ema` those that EMAHook averaged.

    EMAHook swaps the two as it saves: the averaged ones lie in state_dict, those that were trained
    in ema_state_dict.

    Raises:
        UserError: the checkpoint holds no state_dict, or for `ema` no averaged weights.
    """
    weights, swapped = checkpoint.get('state_dict'), checkpoint.get('ema_state_dict')
    if not isinstance(weights, Mapping):
        raise UserError(f'{path!r} must hold a state_dict, as tools/train.py writes it')
    if ema and swapped is None:
        raise UserError(f'{path!r} has no averaged weights, which --ema takes and EMAHook makes')
    if ema or swapped is None:
        return dict(weights)
    trained = {
        name.removeprefix('module.'): tensor
        for name, tensor in swapped.items()
        if name.startswith('module.')
    }
    return {**weights, **trained}


def publish(
    checkpoint: Mapping,
    path: str,
    ema: bool = False,
    metrics: Mapping[str, float] | None = None,
    license: str = LICENSE,  # noqa: A002 - as model cards call it
    command: str | None = None,
) -> dict[str, Any]:
    """What is left of a checkpoint; raises as :func:`choose_weights`.

    Args:
        checkpoint: As tools/train.py writes it.
        path: Of it.
        ema: See :func:`choose_weights`.
        metrics: Name to number, of the test that the weights were put to.
        license: Of the weights.
        command: What made them; by default the training of the config whose text they hold.
    """
    meta = checkpoint.get('meta') or {}
    kept = {name: meta[name] for name in META if name in meta}
    dataset = meta.get('dataset_meta') or {}
    kept['dataset_meta'] = {name: dataset[name] for name in DATASET_META if name in dataset}
    kept['license'] = license
    if metrics:
        kept['metrics'] = dict(metrics)
    # mmengine calls a run by its config and its beginning.
    name = re.sub(r'_\d{8}_\d{6}$', '', meta.get('experiment_name', ''))
    if command or name:
        kept['command'] = command or f'python tools/train.py {name}.py'
    weights = choose_weights(checkpoint, path, ema)
    # A view would bring all that it is a view of along.
    state = OrderedDict((name, x.detach().clone()) for name, x in weights.items())
    if hasattr(checkpoint['state_dict'], '_metadata'):  # the versions of the layers
        state._metadata = checkpoint['state_dict']._metadata
    return dict(meta=kept, state_dict=state)


def save(published: Mapping, out: Path) -> dict[Path, str]:
    """Write the files under names with their hashes; their names and sha256.

    Raises:
        UserError: one of them is there already.
    """
    written = {}
    for suffix, write in WRITERS.items():
        part = out.with_suffix('.part')
        try:
            with part.open('wb') as file:
                write(published, file)
            digest = hashlib.sha256(part.read_bytes()).hexdigest()
            final = out.with_name(f'{out.stem}-{digest[:8]}{suffix}')
            if final.exists():
                raise UserError(f'{str(final)!r} exists already and is left as it is')
            part.rename(final)
        finally:
            part.unlink(missing_ok=True)
        written[final] = digest
    return written


def read_metrics(path: str) -> dict[str, float]:
    """The numbers of a file that tools/test.py wrote with --out.

    Raises:
        UserError: it cannot be read, or holds anything but numbers by name.
    """
    try:
        metrics = json.loads(Path(path).read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise UserError(f'--metrics {path!r} cannot be read: {error}') from error
    if not isinstance(metrics, dict) or not all(
        isinstance(value, int | float) for value in metrics.values()
    ):
        raise UserError(
            f'--metrics {path!r} must hold numbers by name, as tools/test.py --out writes them'
        )
    return metrics


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with user_errors():
        check_checkpoint(args.checkpoint)
        if args.out.suffix not in WRITERS:
            raise UserError(f'OUT.pth must end in {" or ".join(WRITERS)}, got {str(args.out)!r}')
        metrics = read_metrics(args.metrics) if args.metrics else None
        check_writable('OUT.pth', [str(args.out.with_suffix('.part'))])
        register_safe_loading()
        checkpoint = load_from_local(args.checkpoint, map_location='cpu')
        published = publish(
            checkpoint, args.checkpoint, args.ema, metrics, args.license, args.command
        )
        for path in save(published, args.out):
            print(path)


if __name__ == '__main__':
    main()
