"""Compute reference values for a model on the test split of a config, in bits per value.

- order 0: entropy of the histogram of the split, the lower bound for a model without context;
- xz -9: a general-purpose compressor on the same bytes;
- PPMd after the training part (text): an adaptive context model of up to 12 bytes (`pip install
  pyppmd`);
- sorted points (point clouds): order 0 with one histogram for each of z, y and x, minus the
  information in the known order of the points.

    aft_mm reference-bits CONFIG --out references.json
"""

import argparse
from pathlib import Path

from . import add_config_options


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'config', metavar='CONFIG', help='path or name of the config of an autoregressive model'
    )
    parser.add_argument('--out', type=Path, metavar='JSON', help='write the values to this file')
    add_config_options(parser, 'test_dataloader.dataset.data_root=DIR')
    parser.set_defaults(work_dir=None, launcher='none', local_rank=0)
