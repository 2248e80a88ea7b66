"""Plot the keys on images per layer and head, figures 9 to 12 of arXiv 2105.14103.

aft_mm plot keys CONFIG CHECKPOINT a.jpg --out keys.png
"""

import argparse

from . import add_choice_arguments, add_image_arguments, add_picture_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'network', metavar='CONFIG', help='path or name of the config of an image model'
    )
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='path of the checkpoint')
    add_image_arguments(parser, num=1)
    add_choice_arguments(parser)
    add_picture_arguments(parser)
