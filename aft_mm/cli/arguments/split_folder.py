"""Split a folder of class folders into a training and a validation set.

    aft_mm split photos data/my_images --val 0.2

turns photos/cat/1.jpg into data/my_images/train/cat/1.jpg or data/my_images/val/cat/1.jpg, with a
random share of each class for validation. Files are hard links if both folders are on the same
disk, else copies.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'source', metavar='SOURCE', type=Path, help='folder with one folder per class'
    )
    parser.add_argument('out', metavar='OUT', type=Path, help='output folder of train/ and val/')
    parser.add_argument(
        '--val', type=float, default=0.2, help='share of validation images (default: %(default)s)'
    )
    parser.add_argument('--seed', type=int, default=0, help='random seed (default: %(default)s)')
