"""Check this environment: versions, devices, backends of the ops, data.

Each problem is printed with the command that fixes it, and the exit status is then 1.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--kernels',
        nargs='*',
        metavar='OP',
        help='check the GPU kernels of these ops (default: all, which takes many minutes) on '
        'this GPU, and time them against torch operations and flash attention',
    )
