"""Collect runs, or outputs of benchmarks, in a file with a line of JSON for each.

    aft_mm compare collect work_dirs/a_seed0 work_dirs/a_seed1 --out runs.jsonl
    aft_mm compare collect logs/a_seed0.jsonl logs/a_seed0.json --out runs.jsonl

A RUN is a work dir, a log (vis_data/scalars.json, or a copy of it in NAME.jsonl), the metrics of
`aft_mm test --out`, or the output of a benchmark (NAME.json). Its metrics are those of its test
(`metrics.json` or `test.json`), or else of its last validation. Runs of the same name in OUT are
replaced.

`OUT:PATTERN` selects runs in `aft_mm compare` and `aft_mm plot curves`.
"""

import argparse
from pathlib import Path


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN', help='folder or file of a run')
    parser.add_argument('--out', required=True, metavar='JSONL', help='file of runs to write')
    parser.add_argument(
        '--points',
        type=int,
        default=100,
        metavar='N',
        help='points of the training curve at most (default: %(default)s)',
    )
    parser.add_argument(
        '--metric',
        nargs='+',
        default=['loss'],
        metavar='NAME',
        help='training metrics of the curve (default: loss)',
    )
