"""Arguments that several tools have, and a look at the files that they write.

Nothing heavy is imported here, so that `--help` and a wrong argument take no time.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aft_mm.errors import UserError

#: The files that matplotlib draws to, and how fine at most.
PICTURES = ('.png', '.pdf', '.svg', '.jpg')
MOST_DPI = 2400
#: How layers or heads are chosen.
LAYERS = "'all', 'first:4', 'even:6' or numbers as in '0,5,11'"


class Options(argparse.Action):
    """mmengine's KEY=VALUE arguments, with a word on one that is none."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Take the pairs; ends the program as argparse does for what is none."""
        for value in values:
            if not value.partition('=')[0] or '=' not in value:
                parser.error(f'{option_string} needs KEY=VALUE, got {value!r}')
        from mmengine.config import DictAction

        take = DictAction(self.option_strings, self.dest, nargs='+')
        take(parser, namespace, values, option_string)


def add_config_options(parser: argparse.ArgumentParser, example: str) -> None:
    """``--cfg-options``, which :func:`configured` merges."""
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=Options,
        default={},
        metavar='KEY=VALUE',
        help=f'override entries of the config, such as {example}',
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that training and testing have."""
    parser.add_argument('--work-dir', help='folder of logs and checkpoints')
    add_config_options(parser, 'train_cfg.max_epochs=10')
    parser.add_argument(
        '--launcher',
        choices=('none', 'pytorch', 'slurm', 'mpi'),
        default='none',
        help='what started the processes of a distributed run',
    )
    # torch.distributed.launch passes it; torchrun sets the variable.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: float = 1.0) -> None:
    """How to draw, where, and from what config: the arguments of tools that draw from a model."""
    parser.add_argument(
        '--temperature',
        type=float,
        default=temperature,
        help=f'divides the logits; {temperature} unless given',
    )
    parser.add_argument('--top-k', type=int, help='draw among the k likeliest values only')
    parser.add_argument(
        '--top-p', type=float, help='draw among the likeliest values of this probability only'
    )
    parser.add_argument('--greedy', action='store_true', help='take the likeliest value always')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--device', help='by default an accelerator if there is one')
    parser.add_argument(
        '--compile',
        action='store_true',
        help='compile the step of a token on a CPU: seconds to minutes first, then faster steps; '
        'for many or long samples',
    )
    add_config_options(parser, 'test_dataloader.dataset.data_root=DIR')


def add_picture_arguments(parser: argparse.ArgumentParser, dpi: int = 150) -> None:
    """``--out`` and ``--dpi``, which :func:`aft_mm.cli.pictures.check_picture` looks at."""
    parser.add_argument('--out', required=True, metavar='PNG', help='where the picture goes')
    parser.add_argument('--dpi', type=int, default=dpi)


def add_image_arguments(parser: argparse.ArgumentParser, num: int, noise: bool = False) -> None:
    """``--images`` and ``--num``, with ``noise`` also ``--noise``: what goes through a network."""
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument('--images', nargs='+', help='image files; else --num of the test split')
    if noise:
        inputs.add_argument('--noise', action='store_true', help='N(0, 1) in place of images')
    parser.add_argument('--num', type=int, default=num, help='images; %(default)s')


def add_choice_arguments(
    parser: argparse.ArgumentParser, heads: bool = True, layers: str = LAYERS
) -> None:
    """``--layers`` and ``--heads``, which :func:`aft_mm.visualization.choose` reads."""
    parser.add_argument('--layers', default='all', help=layers)
    if heads:
        parser.add_argument('--heads', default='even:12', help=f'{LAYERS}; %(default)s')


def add_network_arguments(parser: argparse.ArgumentParser, num: int, random: bool = False) -> None:
    """A network of any library, its checkpoint and its input, a table and the picture.

    Args:
        parser: gets them.
        num: how many images by default.
        random: whether the network may have random weights, and noise for images.
    """
    parser.add_argument(
        'config',
        metavar='NETWORK',
        help="a config of ours or of mmpretrain, mmpretrain's name of a model, or timm:NAME",
    )
    parser.add_argument('checkpoint', nargs='?' if random else None, help='path of the checkpoint')
    add_image_arguments(parser, num, noise=random)
    parser.add_argument('--csv', metavar='CSV', help='write the numbers to this file, too')
    add_picture_arguments(parser)


def add_runs(parser: argparse.ArgumentParser, kind: str) -> None:
    """The arguments ``logs`` and ``--group``, which plot_curves.py takes apart."""
    parser.add_argument('logs', nargs='*', metavar='[LABEL=]LOG', help=f'{kind} of a run')
    parser.add_argument(
        '--group',
        nargs='+',
        action='append',
        default=[],
        metavar=('LABEL', 'LOG'),
        help='runs that differ by their seed, of which mean and standard error are shown',
    )


def check_writable(name: str, paths: Sequence[str]) -> None:
    """Try to write files before there is something to lose; their folders are made.

    Args:
        name: Of the argument that says where.
        paths: The files; those that exist stay as they are.

    Raises:
        UserError: one cannot be written.
    """
    for path in map(Path, paths):
        try:
            existed = path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open('ab').close()
            if not existed:
                path.unlink(missing_ok=True)  # another process of the run may have been first
        except OSError as error:
            raise UserError(f'{name} {str(path)!r} cannot be written: {error.strerror}') from error


def check_output(name: str, path: str | os.PathLike, suffixes: Sequence[str]) -> None:
    """Look at the file that a tool will write, before it works for it.

    Raises:
        UserError: it has another ending than ``suffixes``, or cannot be written.
    """
    if Path(path).suffix not in suffixes:
        raise UserError(
            f'{name} needs a file name that ends in {" or ".join(suffixes)}, got '
            f'{os.fspath(path)!r}'
        )
    check_writable(name, [os.fspath(path)])
