"""Arguments that several tools have: entries of a config, and the files that they write."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmengine.config import DictAction

from .errors import UserError

#: The files that matplotlib draws to, and how fine at most.
PICTURES = ('.png', '.pdf', '.svg', '.jpg')
MOST_DPI = 2400


class Options(DictAction):
    """mmengine's KEY=VALUE arguments, with a word on one that is none."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: Any, option_string: str | None = None) -> None:
        """Take the pairs; ends the program as argparse does for what is none."""
        for value in values:
            if not value.partition('=')[0] or '=' not in value:
                parser.error(f'{option_string} needs KEY=VALUE, got {value!r}')
        super().__call__(parser, namespace, values, option_string)


def add_config_options(parser: argparse.ArgumentParser, example: str) -> None:
    """``--cfg-options``, which :func:`configured` merges."""
    parser.add_argument(
        '--cfg-options', nargs='+', action=Options, default={}, metavar='KEY=VALUE',
        help=f'override entries of the config, such as {example}')


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
