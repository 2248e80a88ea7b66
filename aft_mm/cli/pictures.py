"""Arguments of the tools that draw figures, the small print below them, and their files."""

import argparse
import csv
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from aft_mm.checks import check_int

from .arguments import MOST_DPI, PICTURES, check_output
from .command_line import check_checkpoint

LAYERS = "'all', 'first:4', 'even:6' or numbers as in '0,5,11'"


def add_picture_arguments(parser: argparse.ArgumentParser, dpi: int = 150) -> None:
    """``--out`` and ``--dpi``, which :func:`check_picture` looks at."""
    parser.add_argument('--out', required=True, metavar='PNG', help='where the picture goes')
    parser.add_argument('--dpi', type=int, default=dpi)


def add_image_arguments(parser: argparse.ArgumentParser, num: int, noise: bool = False) -> None:
    """``--images`` and ``--num``, with ``noise`` also ``--noise``: what goes through a network."""
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument('--images', nargs='+', help='image files; else --num of the test split')
    if noise:
        inputs.add_argument('--noise', action='store_true', help='N(0, 1) in place of images')
    parser.add_argument('--num', type=int, default=num, help='images; %(default)s')


def add_choice_arguments(parser: argparse.ArgumentParser, heads: bool = True,
                         layers: str = LAYERS) -> None:
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
        'config', metavar='NETWORK',
        help="a config of ours or of mmpretrain, mmpretrain's name of a model, or timm:NAME")
    parser.add_argument('checkpoint', nargs='?' if random else None, help='path of the checkpoint')
    add_image_arguments(parser, num, noise=random)
    parser.add_argument('--csv', metavar='CSV', help='write the numbers to this file, too')
    add_picture_arguments(parser)


def check_picture(args: argparse.Namespace) -> None:
    """Look at what a tool will write and read, before it works for it.

    Raises:
        UserError: ``--out`` or ``--csv`` cannot be written or has another ending, or the
            checkpoint does not exist.
        ValueError: ``--dpi`` is out of range.
    """
    check_output('--out', args.out, PICTURES)
    check_int('--dpi', args.dpi, 1, MOST_DPI)
    if getattr(args, 'csv', None):
        check_output('--csv', args.csv, ('.csv',))
    check_checkpoint(getattr(args, 'checkpoint', None))


def footer(config: str, checkpoint: str | os.PathLike | None = None) -> str:
    """``config.py · epoch_12.pth · sha256 0123456789ab``: what a figure is of."""
    words = [Path(config).name]
    if checkpoint is None:
        return f'{words[0]} · random weights'
    words.append(Path(checkpoint).name)
    if os.path.isfile(checkpoint):
        words.append(f'sha256 {hashlib.sha256(Path(checkpoint).read_bytes()).hexdigest()[:12]}')
    return ' · '.join(words)


def save(figure: Figure, args: argparse.Namespace) -> None:
    """Write a figure to ``--out``, without a display."""
    figure.savefig(args.out, dpi=args.dpi)


def write_csv(path: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows of the same keys; floats with six digits."""
    with open(path, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({key: f'{value:.6g}' if isinstance(value, float) else value
                             for key, value in row.items()})
