"""Plot class activation maps of a classifier with the library grad-cam (aft_mm[analysis]).

aft_mm plot cam CONFIG CHECKPOINT a.jpg b.jpg --out cam.png
"""

import argparse

from . import add_image_arguments, add_picture_arguments

METHODS = ('GradCAM', 'GradCAMPlusPlus', 'HiResCAM', 'XGradCAM', 'LayerCAM', 'EigenGradCAM')


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'network', metavar='CONFIG', help='config of a classifier, or a model name of mmpretrain'
    )
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='path of the checkpoint')
    add_image_arguments(parser, num=6)
    parser.add_argument('--category', type=int, help='class number (default: the predicted class)')
    parser.add_argument(
        '--layer',
        help="submodule of the backbone; default as in mmpretrain's vis_cam.py: the last norm, or "
        'with a class token the norm before the last token mixer',
    )
    parser.add_argument('--method', choices=METHODS, default='GradCAM', help='default %(default)s')
    add_picture_arguments(parser)
