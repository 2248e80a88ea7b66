"""Plot effective receptive fields: squared gradients of one position with respect to the pixels.

Without a checkpoint the weights are random.

    aft_mm plot receptive-field NETWORK CHECKPOINT --num 64 --out field.png
    aft_mm plot receptive-field timm:resnet18 --size 224 --out field.png
"""

import argparse

from . import LAYERS, add_choice_arguments, add_network_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser, num=16, random=True)
    add_choice_arguments(
        parser,
        heads=False,
        layers=f'{LAYERS}, or comma-separated names of submodules of the backbone',
    )
    parser.add_argument('--size', type=int, help='edge of the noise images [px]')
    parser.add_argument(
        '--place',
        type=int,
        nargs=2,
        metavar=('ROW', 'COLUMN'),
        help='position in the feature map (default: the centre)',
    )
    parser.add_argument(
        '--radius',
        type=float,
        nargs='+',
        default=[16, 32, 64],
        help='print the share of the energy within these radii [px]',
    )
