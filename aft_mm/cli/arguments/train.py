"""Train a model from a config file."""

import argparse

from . import LATEST, add_config, add_run_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const=LATEST,
        metavar='CHECKPOINT',
        help='resume from this checkpoint, by default from the latest one in the work dir; '
        'with auto, start a new run if the work dir has none',
    )
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision, bfloat16')
    parser.add_argument('--no-validate', action='store_true', help='skip the validation')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by the batch size over auto_scale_lr.base_batch_size',
    )
    add_run_arguments(parser)
