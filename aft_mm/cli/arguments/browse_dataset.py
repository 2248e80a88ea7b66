"""Show samples of a dataset after its pipeline and before normalisation.

Images, boxes, masks, text, point clouds or speech features.

    aft_mm browse CONFIG --split train --num 9 --out samples.png
"""

import argparse

from aft_mm.analysis import AtMost

from . import add_picture_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', metavar='CONFIG', help='path of any config')
    parser.add_argument(
        '--split',
        choices=('train', 'val', 'test'),
        default='train',
        help='part of the data (default: %(default)s)',
    )
    parser.add_argument(
        '--num', type=int, default=AtMost(9), help='number of samples (default: %(default)s)'
    )
    parser.add_argument(
        '--seed', type=int, default=0, help='seed of random transforms (default: %(default)s)'
    )
    add_picture_arguments(parser)
