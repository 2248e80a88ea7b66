"""Average the weights of checkpoints of one run, as usual for translation.

    aft_mm convert average work_dirs/NAME/epoch_*.pth --out averaged.pth

Other tensors, such as counters, and the metadata are those of the last iteration.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('checkpoints', nargs='+', metavar='CHECKPOINT', help='two or more')
    parser.add_argument('--out', required=True, metavar='PTH', help='the averaged checkpoint')
