"""The arguments of the commands in `analysis/`, a function each; its docstring is the help."""

import argparse
from pathlib import Path

from aft_mm.analysis import AtMost

from . import (
    LAYERS,
    add_choice_arguments,
    add_config,
    add_config_options,
    add_image_arguments,
    add_network_arguments,
    add_picture_arguments,
    add_runs,
    add_split,
    add_trained,
    add_value,
)

METHODS = ('GradCAM', 'GradCAMPlusPlus', 'HiResCAM', 'XGradCAM', 'LayerCAM', 'EigenGradCAM')


def plot_curves(parser: argparse.ArgumentParser) -> None:
    """Plot training curves of runs: any metric over iterations, epochs or time.

        aft_mm plot curves AFT=work_dirs/aft DeiT=work_dirs/deit --out a.png
        aft_mm plot curves --group AFT aft_seed0 aft_seed1 aft_seed2 \\
            --metric accuracy/top1 --over time --out a.png

    `FILE.jsonl:PATTERN` names runs of a file of `aft_mm compare collect`.
    """
    add_runs(parser, 'work dir, vis_data/scalars.json, or FILE.jsonl:PATTERN,')
    add_picture_arguments(parser)
    parser.add_argument(
        '--metric',
        action='append',
        metavar='NAME',
        help='training or validation metric; repeat for several, each with its own axes; default: '
        'the first validation metric in bits, otherwise the loss and the first validation metric',
    )
    add_value(parser, '--over', 'iteration', 'x axis', choices=('iteration', 'epoch', 'time'))
    add_value(parser, '--smooth', 1, 'plot the mean of this many logged training values')
    parser.add_argument(
        '--top',
        type=float,
        metavar='VALUE',
        help='upper end of the first axis, for losses that are high at first',
    )


def plot_position_bias(parser: argparse.ArgumentParser) -> None:
    """Plot the position biases of a checkpoint, exp(w) - 1 or exp(w), per layer and head.

    Examples:

        aft_mm plot bias CONFIG CHECKPOINT --heads first:16 --out a.png
        aft_mm plot bias CONFIG CHECKPOINT --view matrix \\
            --quantity exp --out a.png
    """
    add_config(parser)
    parser.add_argument(
        'checkpoint',
        metavar='CHECKPOINT',
        nargs='?',
        help='path of a checkpoint written by `aft_mm train` (default: random weights)',
    )
    add_picture_arguments(parser)
    add_choice_arguments(parser)
    add_value(
        parser,
        '--queries',
        'even:12',
        "query tokens of the grid for a dense bias, in the same notation, or 'prefix' for the class "
        'token',
    )
    add_value(
        parser,
        '--view',
        'queries',
        'for a dense bias on a grid: rows of some queries, or the T x T matrix with the class token',
        choices=('queries', 'matrix'),
    )
    add_value(parser, '--quantity', 'exp-1', 'exp(w) - 1 or exp(w)', choices=('exp-1', 'exp'))
    about = 'one colour scale per layer, or one for all layers'
    add_value(parser, '--scale', 'layer', about, choices=('layer', 'all'))
    parser.add_argument(
        '--csv',
        help='write statistics of exp(w) / sum exp(w) per layer and head to this file: share of '
        'the --top largest positions, entropy, centre, width',
    )
    add_value(parser, '--top', 5, 'number of largest positions')


def plot_keys(parser: argparse.ArgumentParser) -> None:
    """Plot the keys on images per layer and head, figures 9 to 12 of arXiv 2105.14103.

    aft_mm plot keys CONFIG CHECKPOINT a.jpg --out keys.png
    """
    add_trained(parser, 'path or name of the config of an image model')
    add_image_arguments(parser, num=1)
    add_choice_arguments(parser)
    add_picture_arguments(parser)


def plot_attention(parser: argparse.ArgumentParser) -> None:
    """Plot the mean relative attention of a softmax ViT, figures 1 (left) and 5 of arXiv 2105.14103.

    NETWORK must use torch's scaled_dot_product_attention, like the ViT and DeiT of mmpretrain and timm.
    --csv writes per layer and head the mean distance, and the share of the variance of attention that a
    function of the offset explains. Controls are random weights (no CHECKPOINT), --noise and --shuffle.

        aft_mm plot attention NETWORK CHECKPOINT --num 256 --out attention.png
        aft_mm plot attention NETWORK CHECKPOINT --layers 0,2,4 --out a.png
    """
    add_network_arguments(parser, num=64)
    add_choice_arguments(parser)
    parser.add_argument(
        '--shuffle', type=int, metavar='PX', help='permute the squares of PX pixels of each image'
    )
    add_value(parser, '--batch-size', 16, 'images per batch')


def plot_receptive_field(parser: argparse.ArgumentParser) -> None:
    """Plot effective receptive fields: squared gradients of one position with respect to the pixels.

    Without a checkpoint the weights are random.

        aft_mm plot receptive-field NETWORK CHECKPOINT --num 64 --out field.png
        aft_mm plot receptive-field timm:resnet18 --size 224 --out field.png
    """
    add_network_arguments(parser, num=16)
    add_choice_arguments(
        parser,
        heads=False,
        layers=f'{LAYERS}, or comma-separated names of submodules of the backbone',
    )
    parser.add_argument('--size', type=int, help='edge of the noise images [px]')
    parser.add_argument(
        '--place',
        type=int,
        nargs=2,
        metavar=('ROW', 'COLUMN'),
        help='position in the feature map (default: the centre)',
    )
    parser.add_argument(
        '--radius',
        type=float,
        nargs='+',
        default=[16, 32, 64],
        help='print the share of the energy within these radii [px]',
    )


def plot_cam(parser: argparse.ArgumentParser) -> None:
    """Plot class activation maps of a classifier with the library grad-cam (aft_mm[analysis]).

    aft_mm plot cam CONFIG CHECKPOINT a.jpg b.jpg --out cam.png
    """
    add_trained(parser, 'config of a classifier, or a model name of mmpretrain')
    add_image_arguments(parser, num=6)
    parser.add_argument('--category', type=int, help='class number (default: the predicted class)')
    parser.add_argument(
        '--layer',
        help="submodule of the backbone; default as in mmpretrain's vis_cam.py: the last norm, or "
        'with a class token the norm before the last token mixer',
    )
    add_value(parser, '--method', 'GradCAM', 'method of grad-cam', choices=METHODS)
    add_picture_arguments(parser)


def plot_features(parser: argparse.ArgumentParser) -> None:
    """Plot the features of a classifier on the test split with t-SNE (scikit-learn).

    Features are the inputs of the last linear layer.

        aft_mm plot features CONFIG CHECKPOINT --num 300 --out features.png
    """
    add_trained(parser, 'path or name of the config of a classifier')
    add_value(parser, '--num', AtMost(300), 'number of images')
    add_value(parser, '--seed', 0, 'seed of t-SNE')
    add_picture_arguments(parser)


def confusion_matrix(parser: argparse.ArgumentParser) -> None:
    """Plot the confusion matrix of a classifier or segmentor; optionally list classes and mistakes.

    A segmentor is counted by pixels. `--mistakes` plots the most confident mistakes of a classifier.

        aft_mm plot confusion CONFIG CHECKPOINT --out matrix.png \\
            --csv classes.csv --mistakes mistakes.png
    """
    add_trained(parser, 'path or name of the config of a classifier or segmentor')
    add_split(parser, 'test')
    add_value(parser, '--batch-size', 50, 'images per batch')
    parser.add_argument(
        '--csv', help='write images or pixels, accuracy and precision per class to this file'
    )
    parser.add_argument(
        '--mistakes', metavar='PNG', help='plot the most confident mistakes to this file'
    )
    add_value(parser, '--num', 16, 'number of mistakes')
    add_picture_arguments(parser)


def explore(parser: argparse.ArgumentParser) -> None:
    """Write an interactive HTML page of the position biases of a checkpoint and its keys on images.

        aft_mm plot explore CONFIG CHECKPOINT a.jpg b.jpg --out page.html

    The page needs no network connection.
    """
    add_config(parser)
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='path of the checkpoint')
    parser.add_argument(
        'images',
        nargs='*',
        metavar='IMAGE',
        help='image files to show keys for; the model must be a classifier',
    )
    parser.add_argument('--out', required=True, metavar='HTML', help='path of the page')


def compare_runs(parser: argparse.ArgumentParser) -> None:
    """Make a table of runs: metrics, parameters, FLOPs and speed, as Markdown, CSV or LaTeX.

        aft_mm compare runs AFT=work_dirs/aft DeiT=work_dirs/deit --out a.tex
        aft_mm compare runs --group AFT aft_seed0 aft_seed1 \\
            --group DeiT deit_seed0 deit_seed1 --metric accuracy/top1 --out table.md table.csv

    Metrics are those of the last validation. The iteration time is the median of the log. A LOG may
    be `FILE.jsonl:PATTERN`, runs of a file of `aft_mm compare collect`, without parameters and
    FLOPs.
    """
    add_runs(parser, 'work dir, or FILE.jsonl:PATTERN,')
    parser.add_argument(
        '--metric',
        action='append',
        metavar='NAME',
        help='a validation metric; repeat for several (default: all)',
    )
    parser.add_argument(
        '--out',
        nargs='+',
        default=[],
        metavar='FILE',
        help='write the table to these files (.md, .csv or .tex)',
    )


def compare_seeds(parser: argparse.ArgumentParser) -> None:
    """Compare groups of runs that differ by their seed: means and differences with 95 % intervals.

        aft_mm compare seeds --metric bits_per_char \\
            --group AFT-local local_seed*.json --group transformer transformer_seed*.json

    A FILE may be `runs.jsonl:PATTERN`, runs of a file of `aft_mm compare collect`.
    """
    parser.add_argument(
        '--group',
        nargs='+',
        action='append',
        required=True,
        metavar=('LABEL', 'FILE'),
        help='runs that differ by their seed, a file of `aft_mm test --out` for each or '
        'runs.jsonl:PATTERN for several; the other groups are compared with the first',
    )
    parser.add_argument('--metric', required=True, help='name of the metric in the files')
    parser.add_argument(
        '--expect',
        nargs='+',
        default=[],
        metavar='LABEL=SIGN',
        help='expected sign of the difference of a group to the first one, + or -; adds a '
        'column with "same sign here", "opposite sign here" or "inconclusive"',
    )


def collect_runs(parser: argparse.ArgumentParser) -> None:
    """Collect runs, or outputs of benchmarks, in a file with a line of JSON for each.

        aft_mm compare collect work_dirs/a_seed0 work_dirs/a_seed1 --out runs.jsonl
        aft_mm compare collect logs/a_seed0.jsonl logs/a_seed0.json --out runs.jsonl

    A RUN is a work dir, a log (vis_data/scalars.json, or a copy of it in NAME.jsonl), the metrics of
    `aft_mm test --out`, or the output of a benchmark (NAME.json). Its metrics are those of its test
    (`metrics.json` or `test.json`), or else of its last validation. Runs of the same name in OUT are
    replaced.
    """
    parser.add_argument('runs', nargs='+', type=Path, metavar='RUN', help='folder or file of a run')
    parser.add_argument('--out', required=True, metavar='JSONL', help='file of runs to write')
    add_value(parser, '--points', 100, 'points of the training curve at most', metavar='N')
    parser.add_argument(
        '--metric',
        nargs='+',
        default=['loss'],
        metavar='NAME',
        help='training metrics of the curve (default: loss)',
    )


def model_complexity(parser: argparse.ArgumentParser) -> None:
    """Count parameters, FLOPs and activations of the models of configs, including the AFT operations.

    A multiply-add is one FLOP, as is an element of an element-wise operation or a sum; softmax and
    layer norm are five per element. Activations are the output elements of the counted operations.

    Counts are for one image in evaluation mode on the CPU, or for the likelihood of one sequence of the
    largest length.

    Saved is the memory that the backward pass needs for one sample in float32, without parameters and
    gradients; recomputed is the same with `with_cp=True`.
    """
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


def reference_bits(parser: argparse.ArgumentParser) -> None:
    """Compute reference values for an autoregressive model on the test split, in bits per value.

    - order 0: entropy of the histogram of the split, the lower bound for a model without context;
    - xz -9: a general-purpose compressor on the same bytes;
    - PPMd after the training part (text): an adaptive context model of up to 12 bytes (`pip install
      pyppmd`);
    - sorted points (point clouds): order 0 with one histogram for each of z, y and x, minus the
      information in the known order of the points.

        aft_mm reference-bits CONFIG --out references.json
    """
    add_config(parser)
    parser.add_argument('--out', type=Path, metavar='JSON', help='write the values to this file')
    add_config_options(parser, 'test_dataloader.dataset.data_root=DIR')
    parser.set_defaults(work_dir=None, launcher='none', local_rank=0)


def browse_dataset(parser: argparse.ArgumentParser) -> None:
    """Show samples of a dataset after its pipeline and before normalisation.

    Images, boxes, masks, text, point clouds or speech features.

        aft_mm browse CONFIG --split train --num 9 --out samples.png
    """
    add_config(parser)
    add_split(parser, 'train')
    add_value(parser, '--num', AtMost(9), 'number of samples')
    add_value(parser, '--seed', 0, 'seed of random transforms')
    add_picture_arguments(parser)


def demo(parser: argparse.ArgumentParser) -> None:
    """Open a page in the browser that tries a trained model.

        aft_mm demo CONFIG CHECKPOINT

    The page is for this machine only.
    """
    add_config(parser)
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='path of the checkpoint')
    add_value(parser, '--port', 7860, 'port')
