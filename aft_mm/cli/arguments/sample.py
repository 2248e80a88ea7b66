"""Sample images, point clouds or text from a trained model into a PNG, PLY or text file."""

import argparse

from . import add_model, add_sampling_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        '--out',
        required=True,
        metavar='FILE',
        help='.png for images or a picture of point clouds, .ply for the '
        'points themselves (several clouds: FILE-1.ply, FILE-2.ply, ...), .txt for text',
    )
    parser.add_argument(
        '--num',
        type=int,
        help='number of samples (default: 16 images, 8 clouds in a picture, 1 cloud or 1 text)',
    )
    parser.add_argument(
        '--complete',
        nargs='?',
        type=float,
        const=0.5,
        metavar='KEEP',
        help='complete the first images of the test set, given this share of each (default: 0.5)',
    )
    parser.add_argument('--prompt', help='text to continue')
    parser.add_argument(
        '--num-chars',
        type=int,
        help="bytes of text to sample (default: the size of the model's position table)",
    )
    add_sampling_arguments(parser)
