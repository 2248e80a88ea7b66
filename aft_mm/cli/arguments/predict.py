"""Predict classes, boxes or masks of images, and plot them.

CHECKPOINT may also be a file of `aft_mm export`: OUT.onnx, OUT.xml or OUT.pt2, of the same config.

The folder DIR gets pictures/, masks/ (grey level = class), predictions.json and
predictions.csv with one line per class, box or class of a mask.
"""

import argparse

from . import add_config_options, add_model


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='PATH',
        help="image, folder of images or pattern such as 'photos/**/*.jpg'",
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='folder of the results')
    parser.add_argument('--batch-size', type=int, default=8, help='images per batch (default: 8)')
    parser.add_argument(
        '--score',
        type=float,
        help='minimum score of a box (default: that of the best F1 in the validation, which the '
        'checkpoint holds, else 0.3)',
    )
    parser.add_argument('--no-pictures', action='store_true', help='write no pictures')
    parser.add_argument('--device', help='device (default: an accelerator if there is one)')
    add_config_options(parser, 'model.test_cfg.max_per_img=300')
