"""Plot the confusion matrix of a classifier or segmentor; optionally list classes and mistakes.

A segmentor is counted by pixels. `--mistakes` plots the most confident mistakes of a classifier.

    aft_mm plot confusion CONFIG CHECKPOINT --out matrix.png \\
        --csv classes.csv --mistakes mistakes.png
"""

import argparse

from . import add_picture_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'network', metavar='CONFIG', help='path or name of the config of a classifier or segmentor'
    )
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='path of the checkpoint')
    parser.add_argument(
        '--split',
        choices=('train', 'val', 'test'),
        default='test',
        help='part of the data (default: %(default)s)',
    )
    parser.add_argument(
        '--batch-size', type=int, default=50, help='images per batch (default: %(default)s)'
    )
    parser.add_argument(
        '--csv', help='write images or pixels, accuracy and precision per class to this file'
    )
    parser.add_argument(
        '--mistakes', metavar='PNG', help='plot the most confident mistakes to this file'
    )
    parser.add_argument(
        '--num', type=int, default=16, help='number of mistakes (default: %(default)s)'
    )
    add_picture_arguments(parser)
