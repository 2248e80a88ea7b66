"""Plot training curves of runs: any metric over iterations, epochs or time.

    aft_mm plot curves AFT=work_dirs/aft DeiT=work_dirs/deit --out a.png
    aft_mm plot curves --group AFT aft_seed0 aft_seed1 aft_seed2 \\
        --metric accuracy/top1 --over time --out a.png

`FILE.jsonl:PATTERN` names the runs of a file of `aft_mm compare collect` that match.
"""

import argparse
from pathlib import Path

from . import add_picture_arguments, add_runs


def arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser, 'work dir, vis_data/scalars.json, or FILE.jsonl:PATTERN,')
    add_picture_arguments(parser)
    parser.add_argument(
        '--metric',
        action='append',
        metavar='NAME',
        help='training or validation metric; repeat for several, each with its own axes; default: '
        'the first validation metric in bits, otherwise the loss and the first validation metric',
    )
    parser.add_argument(
        '--over', choices=('iteration', 'epoch', 'time'), default='iteration', help='x axis'
    )
    parser.add_argument(
        '--times',
        type=Path,
        metavar='JSON',
        help='with --over time: use the times per iteration in this output of '
        'tools/benchmarks/benchmark_iterations.py instead of those of the logs; other logs than '
        'FILE.jsonl:PATTERN must be named CONFIG_seedN.jsonl',
    )
    parser.add_argument(
        '--reference',
        nargs='*',
        default=[],
        metavar='LABEL=VALUE',
        help='horizontal lines at values of the (last) metric',
    )
