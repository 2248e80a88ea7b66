"""Average the weights of checkpoints of one run, as usual for translation.

    python tools/model_converters/average_checkpoints.py work_dirs/NAME/epoch_*.pth --out averaged.pth

Test, translate and sample with the result as with any checkpoint. Floating-point tensors are averaged
in float64; others, such as counters, come from the last file, as does the metadata.
"""

import argparse
from collections.abc import Mapping, Sequence

from aft_mm.cli.arguments import check_output, tool_parser
from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('checkpoints', nargs='+', metavar='CHECKPOINT', help='two or more')
    parser.add_argument('--out', required=True, metavar='PTH', help='the averaged checkpoint')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # before the slow imports

import torch
from torch import Tensor

from aft_mm.checkpoint import load_from_local
from aft_mm.config.finding import check_checkpoint
from aft_mm.registry import register_safe_loading


def average(paths: Sequence[str]) -> dict:
    """Return a checkpoint with the mean weights of the files."""
    total: dict[str, Tensor] = {}
    for path in paths:
        checkpoint = load_from_local(path, 'cpu')
        weights = checkpoint.get('state_dict')
        if not isinstance(weights, Mapping):
            raise UserError(f'{path!r} must have a state_dict, as tools/train.py writes it')
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        if total and shapes != {name: tensor.shape for name, tensor in total.items()}:
            raise UserError(f'{path!r} must have the weights of {paths[0]!r}, got another model')
        for name, tensor in weights.items():
            if tensor.is_floating_point() and name in total:
                total[name] += tensor.double()
            else:
                total[name] = tensor.double() if tensor.is_floating_point() else tensor
    mean = {
        name: (total[name] / len(paths)).to(tensor.dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }
    meta = {**(checkpoint.get('meta') or {}), 'averaged': len(paths)}
    return dict(meta=meta, state_dict=mean)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with user_errors():
        if len(args.checkpoints) < 2:
            raise UserError('CHECKPOINT must be two files or more, got one')
        for path in args.checkpoints:
            check_checkpoint(path)
        check_output('--out', args.out, ('.pth',))
        register_safe_loading()
        torch.save(average(args.checkpoints), args.out)
    print(f'{args.out} has the mean of {len(args.checkpoints)} checkpoints')


if __name__ == '__main__':
    main()
