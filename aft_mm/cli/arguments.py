"""Arguments that several tools have, and checks of their output files, without heavy imports."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from aft_mm.errors import UserError

#: File formats of matplotlib, and the highest resolution.
PICTURES = ('.png', '.pdf', '.svg', '.jpg')
MAX_DPI = 2400
#: Help text of the selection of layers or heads.
LAYERS = "'all', 'first:4', 'even:6' or numbers as in '0,5,11'"


class AtMost(int):
    """A default number of samples; a smaller dataset gives all."""


def tool_parser(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a program of tools/, which may run as a command such as `aft_mm plot`.

    `about` is its docstring. As a command, examples name the command instead of the file.
    """
    prog = os.path.basename(sys.argv[0])
    if prog.startswith('aft_mm '):
        about = re.sub(r'python tools/\S+\.py', prog, about or '')
    return argparse.ArgumentParser(
        prog=prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_picture_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--out`` and ``--dpi``, which :func:`aft_mm.cli.pictures.check_picture` checks."""
    parser.add_argument('--out', required=True, metavar='PNG', help='path of the picture')
    parser.add_argument('--dpi', type=int, default=150)


def add_image_arguments(parser: argparse.ArgumentParser, num: int, noise: bool = False) -> None:
    """Add images, ``--num`` and, with ``noise``, ``--noise``: the input of a network.

    Images may follow options with :meth:`argparse.ArgumentParser.parse_intermixed_args`.
    """
    parser.add_argument(
        'images', nargs='*', metavar='IMAGE', help='image files; by default --num of the test split'
    )
    if noise:
        parser.add_argument('--noise', action='store_true', help='N(0, 1) instead of images')
    parser.add_argument(
        '--num', type=int, default=AtMost(num), help='number of images (default: %(default)s)'
    )


def add_choice_arguments(
    parser: argparse.ArgumentParser, heads: bool = True, layers: str = LAYERS
) -> None:
    """Add ``--layers`` and ``--heads``, which :func:`aft_mm.visualization.choose` parses."""
    parser.add_argument('--layers', default='all', help=layers)
    if heads:
        parser.add_argument('--heads', default='even:12', help=f'{LAYERS} (default: %(default)s)')


def add_network_arguments(parser: argparse.ArgumentParser, num: int, random: bool = False) -> None:
    """Add a network of any library, its checkpoint, its input, a table and the picture.

    With `random`, random weights and noise are allowed.
    """
    parser.add_argument(
        'config',
        metavar='NETWORK',
        help='a config of aft_mm or mmpretrain, a model name of mmpretrain, or timm:NAME',
    )
    parser.add_argument('checkpoint', nargs='?' if random else None, help='path of the checkpoint')
    add_image_arguments(parser, num, noise=random)
    parser.add_argument('--csv', metavar='CSV', help='also write the numbers to this file')
    add_picture_arguments(parser)


def add_runs(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add ``logs`` and ``--group``, which plot_curves.py parses."""
    parser.add_argument('logs', nargs='*', metavar='[LABEL=]LOG', help=f'{kind} of a run')
    parser.add_argument(
        '--group',
        nargs='+',
        action='append',
        default=[],
        metavar=('LABEL', 'LOG'),
        help='runs with different seeds, shown as mean and standard error',
    )


def refuse_given(args: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raise a UserError with the reason if an option without a default was given."""
    for name in names:
        if getattr(args, name) is not None and getattr(args, name) is not False:  # 0 is given
            raise UserError(f'--{name.replace("_", "-")} {reason}')


def check_writable(name: str, paths: Sequence[str]) -> None:
    """Check that files can be written; create their folders, and raise a UserError with `name`."""
    for path in map(Path, paths):
        try:
            existed = path.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open('ab').close()
            if not existed:
                path.unlink(missing_ok=True)  # another process may be first
        except OSError as error:
            raise UserError(f'{name} {str(path)!r} cannot be written: {error.strerror}') from error


def check_suffix(name: str, path: str | os.PathLike, suffixes: Sequence[str]) -> None:
    if Path(path).suffix not in suffixes:
        raise UserError(f'{name} must end in {" or ".join(suffixes)}, got {os.fspath(path)!r}')


def check_output(name: str, path: str | os.PathLike, suffixes: Sequence[str]) -> None:
    """Raise a UserError unless an output file has one of the suffixes and can be written."""
    check_suffix(name, path, suffixes)
    check_writable(name, [os.fspath(path)])


def numbered(path: str, num: int) -> list[str]:
    """Return ``path`` for one file, else ``a-1.png``, ``a-2.png``, …."""
    stem, suffix = os.path.splitext(path)
    return [path] if num == 1 else [f'{stem}-{i + 1}{suffix}' for i in range(num)]
