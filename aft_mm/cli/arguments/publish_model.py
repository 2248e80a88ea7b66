"""Prepare a training checkpoint for publication: weights, class names and the text of the config.

Metrics, licence and training command are added. OUT-0123abcd.safetensors and OUT-4567cdef.pth have
the same content; their digits are of the sha256.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('checkpoint', metavar='IN.pth', help='checkpoint of `aft_mm train`')
    parser.add_argument(
        'out', metavar='OUT.pth', type=Path, help='output name, to which the digits are appended'
    )
    parser.add_argument(
        '--ema', action='store_true', help='publish the averaged weights of EMAHook'
    )
    parser.add_argument('--metrics', metavar='JSON', help='metrics written by `aft_mm test --out`')
    parser.add_argument(
        '--license',
        metavar='SPDX',
        help='licence of the weights; default: by the training data, as in docs/data.md, if that '
        'settles it',
    )
    parser.add_argument(
        '--command', help='training command (default: that of the run, without its work dir)'
    )
