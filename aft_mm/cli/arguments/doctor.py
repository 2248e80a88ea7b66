"""Check this environment: versions, devices, backends of the ops, data.

Each problem is printed with the command that fixes it, and the exit status is then 1.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--kernels',
        action='store_true',
        help='check the Triton kernels on this GPU, which takes minutes, and store the results; '
        'kernels that pass and are faster than eager are used from then on',
    )
