"""Enlarge an image by sampling from a trained super-resolution model.

The model reads images of one small size, such as 8 x 8 pixels. A larger image needs --fit or
--tile.
"""

import argparse

from . import add_model, add_sampling_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument('input', metavar='IN', help='image file')
    parser.add_argument(
        'out', metavar='OUT.png', help='path of the sample; several: OUT-1.png, OUT-2.png, ...'
    )
    parser.add_argument('--num', type=int, default=1, help='number of samples (default: 1)')
    parser.add_argument(
        '--picture',
        action='store_true',
        help='write one picture instead: input, bicubic enlargement and samples side by side',
    )
    larger = parser.add_mutually_exclusive_group()
    larger.add_argument(
        '--fit',
        nargs='?',
        type=int,
        default=False,
        metavar='CROP',
        help='shrink the central square of CROP pixels (default: the largest) to the size that the '
        'model reads; for models of whole objects such as aligned faces, which should fill the '
        'square as in training',
    )
    larger.add_argument(
        '--tile',
        nargs='?',
        type=int,
        const=2,
        metavar='OVERLAP',
        help='cut the image into tiles of the size that the model reads, which overlap by at least '
        'OVERLAP pixels (default: 2). Tiles are sampled independently and blended linearly, which '
        'hides the seams, but overlaps are smoother, and objects across tiles may not fit together. '
        'Use it for models trained on crops. If the model reads 8 x 8 pixels, '
        'an image of H x W takes about H * W / (8 - OVERLAP)^2 tiles',
    )
    add_sampling_arguments(parser, temperature=0.8)
