"""The command ``aft_mm``: what stands behind it is imported after its arguments."""

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence

from aft_mm.errors import one_sentence

from .. import __version__
from .config_files import find_config
from .parsers import COMMANDS


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command that ``argv`` begins with."""
    parser = argparse.ArgumentParser(
        prog='aft_mm',
        description='Attention Free Transformer for mmengine and mmpretrain.',
        epilog='aft_mm COMMAND --help says more.',
    )
    parser.add_argument('--version', action='version', version=f'aft_mm {__version__}')
    commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)
    for name in COMMANDS:
        about = description(name)
        declare(
            name,
            commands.add_parser(
                name,
                help=about.partition('\n')[0],
                description=about,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            ),
        )
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    args.words = words[1:]
    run(args.command, args)


def script(command: str, argv: Sequence[str] | None = None) -> None:
    """Run one command, as the file of tools/ that is named after it."""
    run(command, parse_args(command, argv))


def parse_args(command: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments of a command alone; ``words`` among them is what they were read from."""
    parser = argparse.ArgumentParser(
        description=description(command), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    declare(command, parser)
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    args.words = words
    return args


def run(command: str, args: argparse.Namespace) -> None:
    """Import a command and run it; a config that is not there ends it before."""
    module, _ = COMMANDS[command]
    with one_sentence():
        if 'config' in args:
            find_config(args.config)
    try:
        code = importlib.import_module(f'aft_mm.cli.commands.{module}')
    except ModuleNotFoundError as error:
        raise SystemExit(
            f'Error: `aft_mm {command}` needs {error.name}, which is not installed; '
            '`pip install aft_mm` brings all that it needs'
        ) from error
    code.main(args)


def declare(command: str, parser: argparse.ArgumentParser) -> None:
    """Give a parser the arguments of a command."""
    COMMANDS[command][1](parser)


def description(command: str) -> str:
    """What a command is for; the first line alone says enough for a list."""
    return inspect.getdoc(COMMANDS[command][1]) or ''
