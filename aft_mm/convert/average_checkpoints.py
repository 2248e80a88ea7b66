"""Average the weights of checkpoints of one run, as usual for translation.

    python tools/model_converters/average_checkpoints.py work_dirs/NAME/epoch_*.pth \\
        --out averaged.pth

Floating-point tensors are averaged in float64; others, such as counters, and the metadata come from
the file of the last iteration.
"""

import argparse
from collections.abc import Sequence

from aft_mm.cli.arguments import tool_parser
from aft_mm.errors import UserError, user_errors
from aft_mm.outputs import check_output


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('checkpoints', nargs='+', metavar='CHECKPOINT', help='two or more')
    parser.add_argument('--out', required=True, metavar='PTH', help='the averaged checkpoint')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # before the slow imports

import torch

from aft_mm.checkpoint import average
from aft_mm.config.finding import check_checkpoint
from aft_mm.registry import register_safe_loading


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
