"""Make a checkpoint of training ready to be given away: weights, classes and the config's text.

Optimizer, schedules, log and the state of the run stay behind. The first 8 digits of the file's
sha256 are added to its name, as OUT-0123abcd.pth, where torch.hub checks them. The file loads with
torch.load(weights_only=True).
"""

import argparse
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aft_mm.checkpoint import load_from_local, register_safe_loading
from aft_mm.cli.arguments import check_writable
from aft_mm.cli.command_line import check_checkpoint
from aft_mm.cli.errors import UserError, one_sentence

# What mmengine writes into meta and a reader of the weights has a use for.
META = ('cfg', 'epoch', 'iter', 'experiment_name', 'mmengine_version')
DATASET_META = ('classes', 'palette')


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


def publish(checkpoint: Mapping, path: str, ema: bool) -> dict[str, Any]:
    """What is left of a checkpoint; raises as :func:`choose_weights`."""
    meta = checkpoint.get('meta') or {}
    kept = {name: meta[name] for name in META if name in meta}
    dataset = meta.get('dataset_meta') or {}
    kept['dataset_meta'] = {name: dataset[name] for name in DATASET_META if name in dataset}
    weights = choose_weights(checkpoint, path, ema)
    # A view would bring all that it is a view of along.
    state = OrderedDict((name, x.detach().clone()) for name, x in weights.items())
    if hasattr(checkpoint['state_dict'], '_metadata'):  # the versions of the layers
        state._metadata = checkpoint['state_dict']._metadata
    return dict(meta=kept, state_dict=state)


def save(published: Mapping, out: Path) -> Path:
    """Write the file under a name with its hash; the name.

    Raises:
        UserError: there is one already.
    """
    part = out.with_suffix('.part')
    try:
        torch.save(dict(published), part)
        digits = hashlib.sha256(part.read_bytes()).hexdigest()[:8]
        final = out.with_name(f'{out.stem}-{digits}.pth')
        if final.exists():
            raise UserError(f'{str(final)!r} exists already and is left as it is')
        part.rename(final)
    finally:
        part.unlink(missing_ok=True)
    return final


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('checkpoint', metavar='IN.pth', help='as tools/train.py writes it')
    parser.add_argument('out', metavar='OUT.pth', type=Path, help='becomes OUT-<8 digits>.pth')
    parser.add_argument(
        '--ema', action='store_true', help='the weights that EMAHook averaged instead of the last'
    )
    args = parser.parse_args(argv)

    with one_sentence():
        check_checkpoint(args.checkpoint)
        if args.out.suffix != '.pth':
            raise UserError(f'OUT.pth needs a file name that ends in .pth, got {str(args.out)!r}')
        check_writable('OUT.pth', [str(args.out.with_suffix('.part'))])
        register_safe_loading()
        checkpoint = load_from_local(args.checkpoint, map_location='cpu')
        print(save(publish(checkpoint, args.checkpoint, args.ema), args.out))


if __name__ == '__main__':
    main()
