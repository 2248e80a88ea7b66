"""The command ``aft_mm``; the module of a command is imported after its arguments are parsed."""

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from aft_mm.config.finding import check_checkpoint, find_config
from aft_mm.errors import UserError, user_errors

from .. import __version__
from .parsers import COMMANDS, LATEST
from .tools import GROUPS, PROGRAMS, run_program, summary

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
