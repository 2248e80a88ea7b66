"""Unpack enwik8 from enwik8.zip (as distributed by Matt Mahoney) or enwik8.gz.

The result is FOLDER/enwik8.
"""

import argparse
from pathlib import Path

SIZE = 100_000_000  # bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('archive', metavar='ARCHIVE', type=Path, help='enwik8.zip or enwik8.gz')
    parser.add_argument(
        'folder',
        metavar='FOLDER',
        type=Path,
        nargs='?',
        default=Path('data/enwik8'),
        help='output folder (default: data/enwik8)',
    )
    parser.add_argument(
        '--size', type=int, default=SIZE, help='expected bytes (default: %(default)s)'
    )
