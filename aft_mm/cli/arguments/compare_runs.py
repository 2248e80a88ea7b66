"""Make a table of runs: metrics, parameters, FLOPs and speed, as Markdown, CSV or LaTeX.

    aft_mm compare runs AFT=work_dirs/aft DeiT=work_dirs/deit --out a.tex
    aft_mm compare runs --group AFT aft_seed0 aft_seed1 \\
        --group DeiT deit_seed0 deit_seed1 --metric accuracy/top1 --out table.md table.csv

Metrics are those of the last validation. The iteration time is the median of the log. A LOG may be
`FILE.jsonl:PATTERN`, the runs of a file of `aft_mm compare collect` that match, without parameters
and FLOPs.
"""

import argparse

from . import add_runs


def arguments(parser: argparse.ArgumentParser) -> None:
    add_runs(parser, 'work dir, or FILE.jsonl:PATTERN,')
    parser.add_argument(
        '--metric',
        action='append',
        metavar='NAME',
        help='a validation metric; repeat for several (default: all)',
    )
    parser.add_argument(
        '--out',
        nargs='+',
        default=[],
        metavar='FILE',
        help='write the table to these files (.md, .csv or .tex)',
    )
