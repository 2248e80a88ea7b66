"""Transcribe speech: one line FILE<tab>TEXT on stdout per file, in order.

A file that cannot be read, or is too long for the model, gets an empty text; the reason is
printed on stderr, and the exit status is 1.
"""

import argparse

from . import add_config_options, add_model


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        'files',
        nargs='*',
        metavar='FILE',
        help='sound, cepstra (.mfc) or Kaldi archive entries; by default read from stdin, one per line',
    )
    parser.add_argument(
        '--beam-size',
        type=int,
        help='prefixes per beam; 1 is greedy (default: the value of the config)',
    )
    parser.add_argument(
        '--num-best',
        type=int,
        default=1,
        metavar='N',
        help='with N above 1 write FILE<tab>SCORE<tab>TEXT for the N best texts of each file, '
        'scores in nats; N must not exceed the beam size',
    )
    parser.add_argument('--batch-size', type=int, default=8, help='files per batch (default: 8)')
    parser.add_argument(
        '--picture', metavar='OUT.png', help='plot the posteriors of the first file over time'
    )
    parser.add_argument('--transcript', help='the spoken text, for the title of the picture')
    parser.add_argument('--device', help='device (default: an accelerator if there is one)')
    add_config_options(parser, 'model.beam_size=16')
