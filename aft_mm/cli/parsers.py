"""The commands of aft_mm, by their arguments.

A command's module in `commands/` is imported when its arguments are known, so nothing heavy is
imported here.
"""

import argparse
from collections.abc import Callable

from .arguments import add_arguments, add_config_options, add_sampling_arguments


def add_config(parser: argparse.ArgumentParser) -> None:
    """The config that a command is about."""
    parser.add_argument(
        'config',
        metavar='CONFIG',
        help='a config file, or the name of one that comes with aft_mm, as `aft_mm list` has them',
    )


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """The checkpoint that goes with it."""
    parser.add_argument(
        'checkpoint', metavar='CHECKPOINT', help='path or http address of the checkpoint'
    )


def train(parser: argparse.ArgumentParser) -> None:
    """Train a model from a config file."""
    add_config(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='go on from this checkpoint, or from the latest one in the work dir',
    )
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision, bfloat16')
    parser.add_argument('--no-validate', action='store_true', help='do not validate')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by the batch size over auto_scale_lr.base_batch_size',
    )
    add_arguments(parser)


def test(parser: argparse.ArgumentParser) -> None:
    """Test a checkpoint with the metrics of a config file."""
    add_config(parser)
    add_checkpoint(parser)
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
        help='average over augmented copies of each image, as tta_model and tta_pipeline say',
    )
    add_arguments(parser)


def sample(parser: argparse.ArgumentParser) -> None:
    """Draw images, point clouds or text from a trained model: a PNG, PLY or text file."""
    add_config(parser)
    add_checkpoint(parser)
    parser.add_argument(
        '--out',
        required=True,
        metavar='FILE',
        help='.png for the images of an image model or a picture of point clouds, .ply for the '
        'points themselves (several clouds: FILE-1.ply, FILE-2.ply, ...), .txt for text',
    )
    parser.add_argument(
        '--num',
        type=int,
        help='how many; by default 16 images, 8 clouds in a picture, 1 cloud in a file or 1 text',
    )
    parser.add_argument(
        '--complete',
        nargs='?',
        type=float,
        const=0.5,
        metavar='KEEP',
        help='complete the first images of the test set, of which this share is given (0.5)',
    )
    parser.add_argument('--prompt', help='text to continue')
    parser.add_argument(
        '--num-chars',
        type=int,
        help="bytes of text to draw; by default as many as the model's position table holds",
    )
    add_sampling_arguments(parser)


def super_resolve(parser: argparse.ArgumentParser) -> None:
    """Enlarge an image by a trained model, which draws what it may have looked like.

    The model reads images of one small size, such as 8 x 8 pixels. A larger one is refused unless
    --fit or --tile says what to do with it.
    """
    add_config(parser)
    add_checkpoint(parser)
    parser.add_argument('input', metavar='IN', help='image file of any kind')
    parser.add_argument(
        'out', metavar='OUT.png', help='the sample; several: OUT-1.png, OUT-2.png, ...'
    )
    parser.add_argument('--num', type=int, default=1, help='how many samples')
    parser.add_argument(
        '--picture',
        action='store_true',
        help='write one picture instead: input, bicubic enlargement and samples side by side',
    )
    larger = parser.add_mutually_exclusive_group()
    larger.add_argument(
        '--fit',
        nargs='?',
        type=int,
        default=False,
        metavar='CROP',
        help='shrink the central square of CROP pixels (the largest unless given) to the size that '
        'the model reads; for models of whole things such as aligned faces, which should fill the '
        'square as they do in training',
    )
    larger.add_argument(
        '--tile',
        nargs='?',
        type=int,
        const=2,
        metavar='OVERLAP',
        help='cut the image into tiles of the size that the model reads, which overlap by OVERLAP '
        'of its pixels (2 unless given) or more; each is drawn on its own, and where two overlap, '
        'one fades linearly into the other: that hides the seams, but it is smoother there, and '
        'what spans tiles need not fit together; for models that were trained on crops; where the '
        'model reads 8 x 8 pixels, an image of H x W takes about H * W / (8 - OVERLAP)^2 tiles, '
        'each of which costs as much as an image of 8 x 8',
    )
    add_sampling_arguments(parser, temperature=0.8)


def translate(parser: argparse.ArgumentParser) -> None:
    """Translate sentences, one a line, from stdin to stdout.

        aft_mm translate CONFIG CHECKPOINT < in.de > out.en

    Line n of the output is the translation of line n of the input; an empty line stays one. With
    --n-best N a line gives several, best first, each as "number of the line, from 0 on ||| text |||
    score". What else there is to say goes to stderr.
    """
    add_config(parser)
    add_checkpoint(parser)
    parser.add_argument('--batch-size', type=int, default=32, help='sentences at a time (32)')
    parser.add_argument(
        '--beam-size', type=int, default=4, help='hypotheses that are kept at every token (4)'
    )
    parser.add_argument(
        '--length-penalty', type=float, default=0.6, help='the larger, the longer (0.6)'
    )
    parser.add_argument(
        '--n-best', type=int, metavar='N', help='write the N best translations of each line'
    )
    parser.add_argument(
        '--sample',
        action='store_true',
        help='draw a translation at random, as the following arguments say, without a beam',
    )
    add_sampling_arguments(parser)


def transcribe(parser: argparse.ArgumentParser) -> None:
    """Write down what is said in files: a line FILE<tab>TEXT on stdout for each, in their order.

    A file that cannot be read, or that is longer than the model reads, has an empty text; stderr
    says why, and the exit status is 1.
    """
    add_config(parser)
    add_checkpoint(parser)
    parser.add_argument(
        'files',
        nargs='*',
        metavar='FILE',
        help='sound, cepstra (.mfc) or places in Kaldi archives; without any, one a line of stdin',
    )
    parser.add_argument(
        '--beam-size',
        type=int,
        help='prefixes that the search keeps; 1 is greedy; by default what the config says',
    )
    parser.add_argument(
        '--num-best',
        type=int,
        default=1,
        metavar='N',
        help='with N above 1 write FILE<tab>SCORE<tab>TEXT for the N best texts of each file, '
        'scores in nats; the beam has to be as wide',
    )
    parser.add_argument('--batch-size', type=int, default=8, help='files computed together')
    parser.add_argument(
        '--picture', metavar='OUT.png', help='draw the posteriors of the first file over time'
    )
    parser.add_argument('--transcript', help='what was said, for the title of the picture')
    parser.add_argument('--device', help='by default an accelerator if there is one')
    add_config_options(parser, 'model.beam_size=16')


def quickstart(parser: argparse.ArgumentParser) -> None:
    """Train AFT-conv on handwritten digits, test it and draw its position biases.

    The data come with scikit-learn. It takes less than three minutes on two idle CPU cores.
    """
    parser.add_argument(
        '--work-dir', default='work_dirs/quickstart', help='where all goes (work_dirs/quickstart)'
    )
    add_config_options(parser, 'train_cfg.max_epochs=10')


def list_configs(parser: argparse.ArgumentParser) -> None:
    """Print the configs, which are the names of the models, too, with what was measured of them.

    A config is "ready" where the libraries of its task are installed; where its data have to lie is
    said by `aft_mm doctor`.
    """
    parser.add_argument(
        'pattern',
        nargs='?',
        default='*',
        metavar='PATTERN',
        help="as of a shell, such as 'aft-conv-*_in1k', or a part of the name",
    )
    parser.add_argument('--task', help='a folder of configs/ only, such as detection')
    parser.add_argument('--measured', action='store_true', help='only those that were trained here')
    parser.add_argument(
        '--ready', action='store_true', help='only those whose libraries are installed'
    )
    parser.add_argument('--names', action='store_true', help='the names alone, one a line')


def config(parser: argparse.ArgumentParser) -> None:
    """Write a copy of a config to edit.

    It holds all its entries, and the place of its data is the one that AFT_MM_DATA gives now.
    """
    add_config(parser)
    parser.add_argument('--out', metavar='FILE', help='the copy; NAME.py in this folder by default')
    parser.add_argument(
        '--keep-bases',
        action='store_true',
        help='copy the file alone, which goes on inheriting from the bases where they lie',
    )
    add_config_options(parser, 'model.backbone.img_size=64')


def doctor(parser: argparse.ArgumentParser) -> None:
    """Check this environment: versions, devices, backends of the ops, data.

    Each problem is printed with the command that fixes it, and the exit status is then 1.
    """
    parser.add_argument(
        '--kernels',
        action='store_true',
        help='check the Triton kernels on this GPU, which takes minutes, and store the results; '
        'kernels that pass and are faster than eager are used from then on',
    )


#: Every command: its module in `commands/` and its arguments.
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    'quickstart': ('quickstart', quickstart),
    'list': ('list_configs', list_configs),
    'config': ('copy_config', config),
    'train': ('train', train),
    'test': ('test', test),
    'sample': ('sample', sample),
    'super-resolve': ('super_resolve', super_resolve),
    'translate': ('translate', translate),
    'transcribe': ('transcribe', transcribe),
    'doctor': ('doctor', doctor),
}
