"""Plot the confusion matrix of a classifier; optionally list classes and plot its worst mistakes.

    aft_mm plot confusion CONFIG CHECKPOINT --out matrix.png \\
        --csv classes.csv --mistakes mistakes.png
"""

import argparse

from . import add_picture_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'network', metavar='CONFIG', help='path or name of the config of a classifier'
    )
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--split', choices=('train', 'val', 'test'), default='test')
    parser.add_argument('--batch-size', type=int, default=50, help='default %(default)s')
    parser.add_argument('--csv', help='write images, accuracy and precision per class to this file')
    parser.add_argument(
        '--mistakes', metavar='PNG', help='plot the most confident mistakes to this file'
    )
    parser.add_argument(
        '--num', type=int, default=16, help='number of mistakes; default %(default)s'
    )
    add_picture_arguments(parser)
