import argparse

from aft_mm.checkpoint import average, save_whole
from aft_mm.config.finding import check_checkpoint
from aft_mm.errors import UserError, user_errors
from aft_mm.outputs import check_output
from aft_mm.registry import register_safe_loading


def run(args: argparse.Namespace) -> None:
    with user_errors(OSError):
        if len(args.checkpoints) < 2:
            raise UserError('CHECKPOINT must be two files or more, got one')
        for path in args.checkpoints:
            check_checkpoint(path)
        check_output('--out', args.out, ('.pth',), args.checkpoints)
        register_safe_loading()
        save_whole(average(args.checkpoints), args.out)
    print(f'{args.out} has the mean of {len(args.checkpoints)} checkpoints')
