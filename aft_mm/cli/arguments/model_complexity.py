"""Count parameters, FLOPs and activations of the models of configs, including the AFT operations.

A multiply-add is one FLOP, as is an element of an element-wise operation or a sum; softmax and
layer norm are five per element. Activations are the output elements of the counted operations.

Counts are for one image in evaluation mode on the CPU, or for the likelihood of one sequence of the
largest length.

Saved is the memory that the backward pass needs for one sample in float32, without parameters and
gradients; recomputed is the same with `with_cp=True`.
"""

import argparse


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('configs', nargs='+', metavar='CONFIG', help='paths or names of configs')
    parser.add_argument(
        '--shape',
        nargs=2,
        type=int,
        metavar=('HEIGHT', 'WIDTH'),
        help='image size (default: that of the test)',
    )
    parser.add_argument(
        '--json', metavar='FILE', help='write all counts by operator and by module to this file'
    )
