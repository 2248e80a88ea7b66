"""Plot the position biases of a checkpoint, exp(w) - 1 or exp(w), per layer and head.

    aft_mm plot bias CONFIG CHECKPOINT --heads first:16 --out a.png
    aft_mm plot bias CONFIG CHECKPOINT --view matrix \\
        --quantity exp --out a.png
"""

import argparse

from . import add_choice_arguments, add_picture_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', metavar='CONFIG', help='path or name of the config')
    parser.add_argument(
        'checkpoint',
        metavar='CHECKPOINT',
        nargs='?',
        help='path of a checkpoint written by `aft_mm train` (default: random weights)',
    )
    add_picture_arguments(parser)
    add_choice_arguments(parser)
    parser.add_argument(
        '--queries',
        default='even:12',
        help='query tokens of the grid for a dense bias, in the same notation, or '
        "'prefix' for the class token (default: %(default)s)",
    )
    parser.add_argument(
        '--view',
        choices=('queries', 'matrix'),
        default='queries',
        help='for a dense bias on a grid: rows of some queries, or the T x T matrix with the class '
        'token (default: %(default)s)',
    )
    parser.add_argument(
        '--quantity',
        choices=('exp-1', 'exp'),
        default='exp-1',
        help='exp(w) - 1 or exp(w) (default: %(default)s)',
    )
    parser.add_argument(
        '--scale',
        choices=('layer', 'all'),
        default='layer',
        help='one colour scale per layer, or one for all layers (default: %(default)s)',
    )
    parser.add_argument(
        '--csv',
        help='write statistics of exp(w) / sum exp(w) per layer and head to this file: share of '
        'the --top largest positions, entropy, centre, width',
    )
    parser.add_argument(
        '--top', type=int, default=5, help='number of largest positions (default: %(default)s)'
    )
