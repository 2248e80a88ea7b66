"""Write release files of finished runs, with model cards and a list of hashes.

    aft_mm release work_dirs/quickstart --out release

The last checkpoint of each work dir is published as by `aft_mm publish`, with the averaged weights
if the run used EMAHook. Its metrics are those of WORK_DIR/metrics.json (`aft_mm test --out`), or
else those of the validation. Runs of one config share a model card NAME.md.

The output folder also gets SHA256SUMS and weights.json. With `--address`, address and hash are
written to the metafiles of configs/.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'work_dirs', nargs='+', metavar='WORK_DIR', help='work dirs of finished runs'
    )
    parser.add_argument('--out', required=True, type=Path, help='a new or empty folder')
    parser.add_argument(
        '--address',
        metavar='hf://ORG/NAME',
        help='future address of the files (or https://...), to add to the metafiles of configs/',
    )
    parser.add_argument(
        '--license',
        metavar='SPDX',
        help='licence of all weights (default: as for `aft_mm publish`)',
    )
