"""Write an interactive HTML page of the position biases of a checkpoint and its keys on images.

    aft_mm plot explore CONFIG CHECKPOINT a.jpg b.jpg --out page.html

The page needs no network connection.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', metavar='CONFIG', help='path or name of the config')
    parser.add_argument(
        'checkpoint',
        metavar='CHECKPOINT',
        help='path of the checkpoint, as `aft_mm train` writes it',
    )
    parser.add_argument(
        'images',
        nargs='*',
        metavar='IMAGE',
        help='image files to show keys for; the model must be a classifier',
    )
    parser.add_argument('--out', required=True, metavar='HTML', help='path of the page')
