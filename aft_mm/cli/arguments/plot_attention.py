"""Plot the mean relative attention of a softmax ViT, figures 1 (left) and 5 of arXiv 2105.14103.

NETWORK must use torch's scaled_dot_product_attention, like the ViT and DeiT of mmpretrain and timm.
--csv writes per layer and head the mean distance, and the share of the variance of attention that a
function of the offset explains. Controls are random weights (no CHECKPOINT), --noise and --shuffle.

    aft_mm plot attention NETWORK CHECKPOINT --num 256 --out attention.png
    aft_mm plot attention NETWORK CHECKPOINT --layers 0,2,4 --out a.png
"""

import argparse

from . import add_choice_arguments, add_network_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    add_network_arguments(parser, num=64, random=True)
    add_choice_arguments(parser)
    parser.add_argument(
        '--shuffle', type=int, metavar='PX', help='permute the squares of PX pixels of each image'
    )
    parser.add_argument(
        '--batch-size', type=int, default=16, help='images per batch (default: %(default)s)'
    )
