"""Plot the features of a classifier on the test split with t-SNE (scikit-learn).

Features are the inputs of the last linear layer; the title gives the share of images whose nearest
neighbour is of their class.

    aft_mm plot features CONFIG CHECKPOINT --num 300 --out features.png
"""

import argparse

from aft_mm.analysis import AtMost

from . import add_picture_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'network', metavar='CONFIG', help='path or name of the config of a classifier'
    )
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='path of the checkpoint')
    parser.add_argument(
        '--num', type=int, default=AtMost(300), help='number of images (default: %(default)s)'
    )
    parser.add_argument(
        '--perplexity',
        type=float,
        help='perplexity of t-SNE (default: 30, or a third of the images if there are fewer than 90)',
    )
    parser.add_argument('--seed', type=int, default=0, help='seed of t-SNE (default: %(default)s)')
    add_picture_arguments(parser)
