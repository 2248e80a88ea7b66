"""Copy a config to edit it.

The copy contains all entries of the bases, each once, and the current AFT_MM_DATA.
"""

import argparse

from . import add_config, add_config_options


def arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        '--out', metavar='FILE', help='path of the copy (default: NAME.py in this folder)'
    )
    parser.add_argument(
        '--keep-bases',
        action='store_true',
        help='copy only the file itself, which inherits from the original bases',
    )
    add_config_options(parser, 'model.backbone.img_size=64')
