"""Turn masks in colours or grey levels into masks of class numbers.

    aft_mm number-masks my_masks/colours my_masks/masks

Every colour becomes a class, numbered by its share of the pixels, the largest first. White on black
gives 0 for the more frequent of the two. The colours are written to classes.txt next to the new
folder, one line #rrggbb per class, or the value in masks of 16 or 32 bits: replace them by names.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('source', type=Path, help='folder of masks, with subfolders')
    parser.add_argument('out', type=Path, help='folder of the new masks, which must not exist')
