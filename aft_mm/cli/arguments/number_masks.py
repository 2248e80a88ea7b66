"""Turn masks in colours or grey levels into masks of class numbers.

    aft_mm number-masks my_masks my_numbers
    aft_mm number-masks my_masks/colours my_masks/masks

A folder of images and masks, in a layout that `aft_mm new masks` reads, gives a folder for it, with
links to the images.

Every colour becomes a class, numbered by its share of the pixels, the largest first. Masks that
have the numbers 0, 1, … already, and perhaps 255 for ignored pixels, keep them. The colours are
written to classes.txt, one line #rrggbb per class; write the name of the class after each.

If there is a classes.txt already, in that place or of --classes, its numbers are used, and a new
colour is an error. CVAT's labelmap.txt is used likewise.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'source',
        metavar='SOURCE',
        nargs='+',
        type=Path,
        help='folder of images and masks, or folders of masks, with subfolders',
    )
    parser.add_argument('out', metavar='OUT', type=Path, help='the new folder')
    parser.add_argument(
        '--classes',
        type=Path,
        metavar='FILE',
        help='number the classes as this classes.txt, with lines such as "#ff0000 cat"',
    )
    parser.add_argument(
        '--ignore',
        action='append',
        default=[],
        metavar='COLOUR',
        help='colour #rrggbb or value of pixels to ignore (255 in the new masks); repeat for several',
    )
