"""Arguments that several tools have: entries of a config, and the files that they write.

Nothing heavy is imported here, so that `--help` and a wrong argument take no time.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import UserError

#: The files that matplotlib draws to, and how fine at most.
PICTURES = ('.png', '.pdf', '.svg', '.jpg')
MOST_DPI = 2400


class Options(argparse.Action):
    """mmengine's KEY=VALUE arguments, with a word on one that is none."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: Any, option_string: str | None = None) -> None:
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
        '--cfg-options', nargs='+', action=Options, default={}, metavar='KEY=VALUE',
        help=f'override entries of the config, such as {example}')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that training and testing have."""
    parser.add_argument('--work-dir', help='folder of logs and checkpoints')
    add_config_options(parser, 'train_cfg.max_epochs=10')
    parser.add_argument(
        '--launcher', choices=('none', 'pytorch', 'slurm', 'mpi'), default='none',
        help='what started the processes of a distributed run')
    # torch.distributed.launch passes it; torchrun sets the variable.
    parser.add_argument(
        '--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: float = 1.0) -> None:
    """How to draw, where, and from what config: the arguments of tools that draw from a model."""
    parser.add_argument(
        '--temperature', type=float, default=temperature,
        help=f'divides the logits; {temperature} unless given')
    parser.add_argument('--top-k', type=int, help='draw among the k likeliest values only')
    parser.add_argument(
        '--top-p', type=float, help='draw among the likeliest values of this probability only')
    parser.add_argument('--greedy', action='store_true', help='take the likeliest value always')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--device', help='by default an accelerator if there is one')
    parser.add_argument(
        '--compile', action='store_true',
        help='compile the step of a token on a CPU: seconds to minutes first, then faster steps; '
        'for many or long samples')
    add_config_options(parser, 'test_dataloader.dataset.data_root=DIR')


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
            raise UserError(
                f'{name} {str(path)!r} cannot be written: {error.strerror}') from error


def check_output(name: str, path: str | os.PathLike, suffixes: Sequence[str]) -> None:
    """Look at the file that a tool will write, before it works for it.

    Raises:
        UserError: it has another ending than ``suffixes``, or cannot be written.
    """
    if Path(path).suffix not in suffixes:
        raise UserError(f'{name} needs a file name that ends in {" or ".join(suffixes)}, got '
                        f'{os.fspath(path)!r}')
    check_writable(name, [os.fspath(path)])
