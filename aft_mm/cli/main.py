"""The command ``aft_mm``: how a command runs, and the arguments of each, without heavy imports.

The module of a command is imported after its arguments are parsed.
"""

import argparse
import glob
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from aft_mm.config.finding import check_checkpoint, configs_by_name, find_config
from aft_mm.errors import UserError, user_errors

from .. import __version__
from .arguments import refuse_given
from .tools import GROUPS, PROGRAMS, run_program, summary

#: Value of ``--resume`` without a path; no file can have this name.
LATEST = '\0latest'
# The dynamic linker's messages without memory.
NO_MEMORY = re.compile('failed to map segment|[Cc]annot allocate memory')


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog='aft_mm',
        description='Attention Free Transformer for mmengine and mmpretrain.',
        epilog='See `aft_mm COMMAND --help` for the arguments of a command.',
    )
    parser.add_argument('--version', action='version', version=f'aft_mm {__version__}')
    commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)
    for name, (_, declare) in COMMANDS.items():
        about = description(name)
        options = dict(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
        declare(commands.add_parser(name, help=about.partition('\n')[0], **options))
    for name, program in PROGRAMS.items():
        about = summary(program) if isinstance(program, str) else GROUPS[name]
        commands.add_parser(name, help=about)
    if '_ARGCOMPLETE' in os.environ:  # set by the completion of a shell
        importlib.import_module('argcomplete').autocomplete(parser)
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in PROGRAMS:  # which parse their arguments themselves
        run_program(argv)
        return
    args = parser.parse_args(argv)
    args.argv = argv[1:]
    run(args.command, args)


def script(command: str) -> None:
    run(command, parse_args(command, sys.argv[1:]))


def parse_args(command: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of one command; ``args.argv`` holds them unparsed."""
    parser = argparse.ArgumentParser(
        description=description(command), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    COMMANDS[command][1](parser)
    args = parser.parse_args(argv)
    args.argv = argv
    return args


def run(command: str, args: argparse.Namespace) -> None:
    module, _ = COMMANDS[command]
    with user_errors():
        check_paths(args)
    try:
        code = importlib.import_module(f'aft_mm.cli.commands.{module}')
    except ModuleNotFoundError as error:
        raise SystemExit(
            f'Error: `aft_mm {command}` needs {error.name}, which is not installed; '
            '`pip install aft_mm` installs all requirements'
        ) from error
    except ImportError as error:
        if not NO_MEMORY.search(str(error)):
            raise
        refuse_memory(command, str(error))
    except MemoryError:
        refuse_memory(command)
    try:
        code.main(args)
    except MemoryError:
        refuse_memory(command)


def check_paths(args: argparse.Namespace) -> None:
    """Find the config, and check files and folders, before torch is imported."""
    if 'config' in args:
        args.config = find_config(args.config)
    check_checkpoint(getattr(args, 'checkpoint', None))
    if getattr(args, 'resume', None) not in (None, LATEST, 'auto'):
        check_checkpoint(args.resume)
    for path in [*getattr(args, 'inputs', ()), *filter(None, [getattr(args, 'path', None)])]:
        if not os.path.lexists(path) and not any(sign in path for sign in '*?['):
            raise UserError(f'PATH {path!r} does not exist')


def refuse_memory(command: str, reason: str = 'out of memory') -> NoReturn:
    raise SystemExit(
        f'Error: `aft_mm {command}` needs more memory than it may take ({reason}); see ulimit -v'
    )


def description(command: str) -> str:
    """Return the description of a command; its first line is a summary."""
    return inspect.getdoc(COMMANDS[command][1]) or ''


class Options(argparse.Action):
    """mmengine's KEY=VALUE arguments, with an error message for others."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        for value in values:
            if not value.partition('=')[0] or '=' not in value:
                parser.error(f'{option_string} needs KEY=VALUE, got {value!r}')
        from mmengine.config import DictAction

        take = DictAction(self.option_strings, self.dest, nargs='+')
        try:
            take(parser, namespace, values, option_string)
        except AssertionError:
            parser.error(f'{option_string} needs balanced brackets, got {" ".join(values)!r}')


def add_config_options(parser: argparse.ArgumentParser, example: str) -> None:
    """Add ``--cfg-options``, which :func:`aft_mm.config.reading.read_config` merges."""
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=Options,
        default={},
        metavar='KEY=VALUE',
        help=f'override entries of the config, such as {example}',
    )


def add_run_arguments(parser: argparse.ArgumentParser, work_dir: str = 'work_dirs/NAME') -> None:
    parser.add_argument('--work-dir', help=f'folder of the output (default: {work_dir})')
    add_config_options(parser, 'train_cfg.max_epochs=10')
    parser.add_argument(
        '--launcher',
        choices=('none', 'pytorch', 'slurm', 'mpi'),
        default='none',
        help='launcher of a distributed run',
    )
    # torch.distributed.launch passes it.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: float = 1.0) -> None:
    parser.add_argument(
        '--temperature', type=float, help=f'divides the logits (default: {temperature})'
    )
    parser.add_argument('--top-k', type=int, help='sample among the k most likely values')
    parser.add_argument(
        '--top-p', type=float, help='sample among the most likely values with this probability'
    )
    parser.add_argument('--greedy', action='store_true', help='always take the most likely value')
    parser.add_argument('--seed', type=int, help='random seed (default: 0)')
    parser.add_argument('--device', help='by default an accelerator, if there is one')
    parser.add_argument(
        '--compile',
        action='store_true',
        help='compile the step of a token on a CPU, which takes seconds to minutes; use it for many or '
        'long samples',
    )
    add_config_options(parser, 'test_dataloader.dataset.data_root=DIR')


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: getattr(args, name) for name in ('top_k', 'top_p', 'greedy')}
    if args.greedy:
        names = ('temperature', 'top_k', 'top_p', 'seed')
        refuse_given(args, names, 'and --greedy cannot be combined: nothing is sampled')
    if args.temperature is not None:
        options['temperature'] = args.temperature
    return dict(**options, seed=args.seed or 0, compiled=args.compile)


def add_config(parser: argparse.ArgumentParser) -> None:
    action: Any = parser.add_argument(
        'config',
        metavar='CONFIG',
        help='path of a config, or a name or part of one listed by `aft_mm list`',
    )
    action.completer = complete_config  # read by argcomplete


def complete_config(prefix: str, **_: Any) -> list[str]:
    """Return the configs and files that begin with ``prefix``, for the completion of a shell."""
    names = [name for name in configs_by_name() if name.startswith(prefix)]
    return [*names, *glob.glob(f'{glob.escape(prefix)}*')]


def add_model(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument('checkpoint', metavar='CHECKPOINT', help='path, https:// or hf:// address')


def add_average(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--average',
        type=int,
        default=1,
        metavar='N',
        help='average the weights of CHECKPOINT, such as epoch_100.pth, and the N - 1 checkpoints '
        'before it',
    )


def new(parser: argparse.ArgumentParser) -> None:
    """Write a config for your own data.

        image-folder  PATH/CLASS/*.jpg, or train/ and val/ of such folders
        coco          a json file with boxes, or a folder with one per set, and the images
        voc           PATH/JPEGImages, PATH/Annotations and, if there are lists, PATH/ImageSets/Main
        masks         PATH/images and PATH/masks (grey level = class), or train, train_masks, val …
        text          a file, plain or gzip

    Without a validation set, the same share of every class is sampled for validation. Files are not
    moved or changed; the lists are written next to the config.
    """
    parser.add_argument('kind', choices=('image-folder', 'coco', 'voc', 'masks', 'text'))
    parser.add_argument('path', metavar='PATH', help='the data')
    parser.add_argument(
        '--out', metavar='NAME.py', help='the config (default: PATH.py in this folder)'
    )
    parser.add_argument('--val', type=float, help='share of validation images (default: 0.2)')
    parser.add_argument('--seed', type=int, help='seed of the split (default: 0)')


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
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision, bfloat16')
    parser.add_argument('--no-validate', action='store_true', help='skip the validation')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by the batch size over auto_scale_lr.base_batch_size',
    )
    add_run_arguments(parser)


def test(parser: argparse.ArgumentParser) -> None:
    """Test a checkpoint with the metrics of a config file."""
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
        help='average over augmented copies of each image, defined by tta_model and tta_pipeline',
    )
    add_run_arguments(parser, 'work_dirs/NAME/test')


def predict(parser: argparse.ArgumentParser) -> None:
    """Predict classes, boxes or masks of images, and plot them.

    The folder DIR gets pictures/, masks/ (grey level = class), predictions.json and
    predictions.csv with one line per class, box or class of a mask.
    """
    add_model(parser)
    parser.add_argument(
        'inputs',
        nargs='+',
        metavar='PATH',
        help="image, folder of images or pattern such as 'photos/**/*.jpg'",
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='folder of the results')
    parser.add_argument('--batch-size', type=int, default=8, help='images per batch (default: 8)')
    parser.add_argument('--score', type=float, help='minimum score of a box (default: 0.3)')
    parser.add_argument('--no-pictures', action='store_true', help='write no pictures')
    parser.add_argument('--device', help='by default an accelerator, if there is one')
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
        help='number of samples; by default 16 images, 8 clouds in a picture, 1 cloud or 1 text',
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
        help="bytes of text to sample; by default the size of the model's position table",
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
    parser.add_argument('--num', type=int, default=1, help='number of samples (default: 1)')
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

    Line n of the output is the translation of line n of the input; empty lines stay empty. With
    --n-best N each input line gives several output lines, best first, in the form "index of the
    input line, from 0 ||| text ||| score". Messages go to stderr.
    """
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
        help='prefixes per beam; 1 is greedy; by default the value of the config',
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
    parser.add_argument('--device', help='by default an accelerator if there is one')
    add_config_options(parser, 'model.beam_size=16')


def quickstart(parser: argparse.ArgumentParser) -> None:
    """Train AFT-conv on handwritten digits, test it and plot its position biases.

    The data come with scikit-learn. This takes less than three minutes on two idle CPU cores.
    """
    parser.add_argument(
        '--work-dir',
        default='work_dirs/quickstart',
        help='output folder (default: work_dirs/quickstart)',
    )
    add_config_options(parser, 'train_cfg.max_epochs=10')


def list_configs(parser: argparse.ArgumentParser) -> None:
    """List the configs, which are also the model names, with their measured results.

    A config is "ready" if the libraries of its task are installed; `aft_mm doctor` shows where its
    data are expected.
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
    parser.add_argument(
        '--measured', action='store_true', help='only configs with measured results'
    )
    parser.add_argument(
        '--ready', action='store_true', help='only configs whose libraries are installed'
    )
    parser.add_argument('--names', action='store_true', help='print only the names, one per line')


def config(parser: argparse.ArgumentParser) -> None:
    """Copy a config to edit it.

    The copy contains all entries of the bases that are used, each once, and the current AFT_MM_DATA
    as the data folder.
    """
    add_config(parser)
    parser.add_argument(
        '--out', metavar='FILE', help='path of the copy (default: NAME.py in this folder)'
    )
    parser.add_argument(
        '--keep-bases',
        action='store_true',
        help='copy only the file itself, which inherits from the original bases',
    )
    add_config_options(parser, 'model.backbone.img_size=64')


def doctor(parser: argparse.ArgumentParser) -> None:
    """Check this environment: versions, devices, backends of the ops, data.

    Each problem is printed with the command that fixes it, and the exit status is then 1.
    """
    parser.add_argument(
        '--kernels',
        nargs='*',
        metavar='OP',
        help='check the Triton kernels of these ops (default: all, which takes many minutes) on '
        'this GPU, and time them against torch operations and flash attention',
    )


#: The module in `commands/` and the arguments of every command.
COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    'quickstart': ('quickstart', quickstart),
    'list': ('list_configs', list_configs),
    'new': ('new', new),
    'config': ('copy_config', config),
    'train': ('train', train),
    'test': ('test', test),
    'predict': ('predict', predict),
    'sample': ('sample', sample),
    'super-resolve': ('super_resolve', super_resolve),
    'translate': ('translate', translate),
    'transcribe': ('transcribe', transcribe),
    'doctor': ('doctor', doctor),
}
