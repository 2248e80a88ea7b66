"""List the configs, which are also the model names, with their measured results.

With --mixers, list the token mixers by their type in a config, also those of other packages.

The column "trained" names a model whose weights come with aft_mm, for `aft_mm sample NAME`,
`transcribe NAME` and `predict NAME`. A config is "ready" if the libraries of its task are
installed.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'pattern',
        nargs='?',
        default='*',
        metavar='PATTERN',
        help="shell pattern such as 'aft-conv-*_in1k', or a part of the name",
    )
    parser.add_argument(
        '--task', help='only configs of this task, a folder of configs/ such as detection'
    )
    parser.add_argument(
        '--measured', action='store_true', help='only configs with measured results'
    )
    parser.add_argument(
        '--ready', action='store_true', help='only configs whose libraries are installed'
    )
    parser.add_argument('--mixers', action='store_true', help='token mixers instead of configs')
    parser.add_argument('--names', action='store_true', help='print only the names, one per line')
