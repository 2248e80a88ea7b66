import argparse
from pathlib import Path

from . import add_config, add_flag


def export(parser: argparse.ArgumentParser) -> None:
    """Export a trained model: OUT.onnx for ONNX (opset 20), OUT.xml for OpenVINO, OUT.pt2 for torch.

    Inputs: image [B, C, H, W], of text tokens [1, T], of speech frames [B, T, F] and mask [B, T].
    Outputs: scores, of detectors also boxes and labels, of speech log_probs, with --backbone maps.

    OUT.json says how an image becomes the input. The file is compared with the model on other inputs.
    `aft_mm predict CONFIG OUT` runs it.

    With --steps, an autoregressive model gives two files, OUT-prompt and OUT-step, each of which
    returns the state that the next step takes. With --loops, AFT-conv is an operator in C++, in a
    library for processors like this one and, of OpenVINO, for the installed release.
    """
    add_config(parser)
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='path of the checkpoint')
    parser.add_argument('out', metavar='OUT', type=Path, help='OUT.onnx, OUT.xml or OUT.pt2')
    add_flag(parser, '--dynamic', 'support any image size and batch size')
    parser.add_argument(
        '--size',
        nargs=2,
        type=int,
        metavar=('H', 'W'),
        help='image size in pixels (default: that of the test)',
    )
    add_flag(parser, '--backbone', 'export feature maps instead of scores')
    add_flag(parser, '--steps', 'export a prompt and a step, to generate sequences')
    add_flag(parser, '--int8', 'quantise matrix products of OUT.onnx or OUT.xml')
    add_flag(
        parser,
        '--loops',
        'compute AFT-conv by C++ loops, in OUT.loops.so or, next to OUT.xml, OUT.openvino.so',
    )
    add_flag(
        parser,
        '--bfloat16',
        'round the inputs of the loops in OUT.xml to bfloat16, for inference in bfloat16',
    )
    add_flag(
        parser,
        '--test',
        'compute the metrics of a classifier and of OUT on the test data of the config',
    )
