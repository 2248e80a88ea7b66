"""Compare groups of runs that differ by their seed: means and differences with 95 % intervals.

    aft_mm compare seeds --metric bits_per_char --out seeds.png \\
        --group AFT-local local_seed*.json --group transformer transformer_seed*.json

A FILE may be `runs.jsonl:PATTERN`, the runs of a file of `aft_mm compare collect` that match.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--group',
        nargs='+',
        action='append',
        required=True,
        metavar=('LABEL', 'FILE'),
        help='runs that differ by their seed, a file of `aft_mm test --out` for each or '
        'runs.jsonl:PATTERN for several; the other groups are compared with the first',
    )
    parser.add_argument('--metric', required=True, help='name of the metric in the files')
    parser.add_argument('--label', help='axis label with the unit, such as bits/char')
    parser.add_argument('--out', metavar='PNG', help='write a picture to this file')
    parser.add_argument('--table', metavar='MD', help='write the table to this file')
    parser.add_argument(
        '--numbers',
        metavar='TITLE',
        help='the group labels are numbers: use a logarithmic axis with this title',
    )
    parser.add_argument(
        '--expect',
        nargs='+',
        default=[],
        metavar='LABEL=SIGN',
        help='expected sign of the difference of a group to the first one, + or -; adds a '
        'column with "same sign here", "opposite sign here" or "inconclusive"',
    )
    parser.add_argument('--dpi', type=int, default=150, help='dots per inch (default: %(default)s)')
