"""Translate sentences from stdin to stdout, one per line.

    aft_mm translate CONFIG CHECKPOINT < in.de > out.en

Line n of the output is the translation of line n of the input. With --n-best N each line gives
several, best first, as "index of the input line, from 0 ||| text ||| score".
"""

import argparse

from . import add_average, add_model, add_sampling_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_average(parser)
    parser.add_argument(
        '--batch-size', type=int, default=32, help='sentences per batch (default: 32)'
    )
    parser.add_argument('--beam-size', type=int, help='hypotheses per beam (default: 4)')
    parser.add_argument(
        '--length-penalty',
        type=float,
        help='larger values prefer longer translations (default: 0.6)',
    )
    parser.add_argument(
        '--n-best', type=int, metavar='N', help='write the N best translations of each line'
    )
    parser.add_argument(
        '--sample',
        action='store_true',
        help='sample a translation with the arguments below instead of beam search',
    )
    add_sampling_arguments(parser)
