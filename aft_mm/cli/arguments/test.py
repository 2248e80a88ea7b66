"""Test a checkpoint with the metrics of a config file."""

import argparse

from . import add_average, add_model, add_run_arguments


def arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_average(parser)
    parser.add_argument('--out', metavar='JSON', help='write the metrics to this file')
    parser.add_argument('--dump', metavar='PKL', help='write the predictions to this file')
    parser.add_argument(
        '--amp',
        action='store_true',
        help="mmengine's autocast of the test loop: bfloat16 on a CPU, float16 on CUDA",
    )
    parser.add_argument(
        '--tta',
        action='store_true',
        help='average over augmented copies of each image, those of tta_model and tta_pipeline of the '
        'config, by default the image and its mirror image',
    )
    parser.add_argument(
        '--show-dir', metavar='DIR', help='write a picture of each image with its prediction'
    )
    parser.add_argument(
        '--show', action='store_true', help='display each image with its prediction in a window'
    )
    parser.add_argument(
        '--wait-time',
        type=float,
        metavar='SECONDS',
        help='how long --show displays each picture (default: 2); 0 waits for a key',
    )
    add_run_arguments(parser, 'work_dirs/NAME/test')
