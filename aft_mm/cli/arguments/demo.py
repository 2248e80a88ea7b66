"""Open a page in the browser that tries a trained model.

    aft_mm demo CONFIG CHECKPOINT

The page is for this machine only.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', metavar='CONFIG', help='path or name of the config')
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='path of a checkpoint')
    parser.add_argument('--port', type=int, default=7860, help='port, default %(default)s')
