"""Check this environment: versions, imports, devices, data.

The first lines say what is wrong and how to mend it; the exit status is then 1.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--backends',
        action='store_true',
        help='also print which backend runs each op on each device, and why others do not',
    )
    parser.add_argument(
        '--kernels',
        nargs='*',
        metavar='OP',
        help='check the GPU kernels of these ops (default: all, which takes many minutes) on '
        'this GPU, and time them against torch operations and flash attention',
    )
