"""The command ``aft_mm``: its commands, how one is parsed and run.

COMMANDS names the module of a command, which is imported once the arguments are parsed
(docs/architecture.md). Another package adds one by an entry point ``aft_mm.commands``.
"""

import argparse
import functools
import importlib
import inspect
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, NoReturn, cast

from aft_mm.config.finding import check_checkpoint, find_config, similar_names
from aft_mm.deprecation import warn_old_name
from aft_mm.errors import UserError, user_errors

from .. import __version__
from .arguments import LATEST, check_picture, choose_weights

#: Commands of several kinds.
GROUPS = {
    'plot': 'Plot a training, a model or its predictions.',
    'compare': 'Compare runs, or groups of runs with several seeds.',
    'convert': 'Convert data sets, vocabularies and checkpoints.',
}
#: The module of aft_mm that runs a command; a function of its name in `arguments/` declares it.
COMMANDS = {
    'quickstart': 'cli.commands.quickstart',
    'list': 'cli.commands.list_configs',
    'new': 'cli.commands.new',
    'config': 'cli.commands.copy_config',
    'train': 'cli.commands.train',
    'test': 'cli.commands.test',
    'predict': 'cli.commands.predict',
    'sample': 'cli.commands.sample',
    'super-resolve': 'cli.commands.super_resolve',
    'translate': 'cli.commands.translate',
    'transcribe': 'cli.commands.transcribe',
    'doctor': 'cli.commands.doctor',
    'plot curves': 'analysis.plot_curves',
    'plot bias': 'analysis.plot_position_bias',
    'plot keys': 'analysis.plot_keys',
    'plot attention': 'analysis.plot_attention',
    'plot receptive-field': 'analysis.plot_receptive_field',
    'plot cam': 'analysis.plot_cam',
    'plot features': 'analysis.plot_features',
    'plot confusion': 'analysis.confusion_matrix',
    'plot explore': 'analysis.explore',
    'compare runs': 'analysis.compare_runs',
    'compare seeds': 'analysis.compare_seeds',
    'compare collect': 'analysis.collect_runs',
    'complexity': 'analysis.model_complexity',
    'reference-bits': 'analysis.reference_bits',
    'browse': 'analysis.browse_dataset',
    'demo': 'analysis.demo',
    'convert enwik8': 'convert.enwik8',
    'convert subwords': 'convert.subwords',
    'convert wmt14': 'convert.wmt14',
    'convert shapenet': 'convert.shapenet',
    'convert deit': 'convert.deit_to_aft',
    'convert vit': 'convert.vit_weights',
    'convert average': 'convert.average_checkpoints',
    'export': 'export.export',
    'publish': 'convert.publish_model',
    'release': 'cli.commands.release_weights',
    'licenses': 'convert.data_licenses',
    'split': 'convert.split_folder',
    'number-masks': 'convert.number_masks',
}
#: Commands that `mim` and tools/launch.py start as scripts of tools/; the other scripts are old names.
SCRIPTS = ('train', 'test')
RAW = argparse.RawDescriptionHelpFormatter
# The dynamic linker's messages without memory.
NO_MEMORY = re.compile('failed to map segment|[Cc]annot allocate memory')


def main(argv: Sequence[str] | None = None) -> None:
    if argv is None:
        end_at_interrupt()
    argv = list(sys.argv[1:] if argv is None else argv)
    if '_ARGCOMPLETE' in os.environ:  # set by the completion of a shell
        importlib.import_module('argcomplete').autocomplete(all_commands())
    words = 2 if argv and argv[0] in GROUPS else 1
    command = ' '.join(argv[:words])
    if command in COMMANDS or command in commands_of_others():
        run(command, parse_args(command, argv[words:], f'aft_mm {command}'))
        return
    if command in GROUPS:
        argv.append('--help')
    elif words == 2 and not argv[1].startswith('-'):
        refuse_kind(*argv[:2])
    parser = all_commands()
    parser.parse_args(argv)  # prints the help, the version or an error
    parser.error('COMMAND must be the first argument')


def script(command: str) -> None:
    end_at_interrupt()
    if command not in SCRIPTS:
        warn_old_name(sys.argv[0], f'`aft_mm {command}`', '0.3.0')
    run(command, parse_args(command, sys.argv[1:]))


def end_at_interrupt() -> None:
    """Have SIGINT end this process as SIGTERM does, without a traceback of an import."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def parse_args(command: str, argv: Sequence[str], prog: str | None = None) -> argparse.Namespace:
    about, add_arguments = declaration(command)
    parser = argparse.ArgumentParser(prog, description=about, formatter_class=RAW)
    add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    args.argv = list(argv)
    return args


@functools.cache
def commands_of_others() -> dict[str, EntryPoint]:
    """Return the entry points ``aft_mm.commands`` by name."""
    points = {point.name: point for point in entry_points(group='aft_mm.commands')}
    for name, point in points.items():
        if name in {*COMMANDS, *GROUPS} or not re.fullmatch('[a-z][a-z0-9-]*', name):
            raise SystemExit(
                f'Error: a command of another package must have a new name of a-z, 0-9 and -, got '
                f'{name!r} of {point.value}'
            )
    return points


def module_of_others(command: str) -> ModuleType:
    point = commands_of_others()[command]
    try:
        return cast(ModuleType, point.load())
    except Exception as error:
        raise SystemExit(
            f'Error: the command {command} ({point.value}) cannot be imported: '
            f'{type(error).__name__}: {error}'
        ) from error


def declaration(command: str) -> tuple[str, Callable[[argparse.ArgumentParser], None]]:
    """Return the help of a command, and the function that adds its arguments to a parser."""
    if command not in COMMANDS:
        module = module_of_others(command)
        return module.__doc__ or '', module.arguments
    room, name = COMMANDS[command].split('.')[-2:]
    add_arguments = getattr(importlib.import_module(f'aft_mm.cli.arguments.{room}'), name)
    return inspect.getdoc(add_arguments) or '', add_arguments


def all_commands() -> argparse.ArgumentParser:
    """Return a parser with every command, for the list of commands and for completion."""
    parser = argparse.ArgumentParser(
        prog='aft_mm',
        description='Attention Free Transformer for PyTorch and OpenMMLab.',
        epilog='See `aft_mm COMMAND --help` for the arguments of a command.',
    )
    parser.add_argument('--version', action='version', version=f'aft_mm {__version__}')
    subparsers = {'': parser.add_subparsers(dest='command', metavar='COMMAND', required=True)}
    for command in (*COMMANDS, *commands_of_others()):
        group, _, name = command.rpartition(' ')
        if group not in subparsers:
            kinds = subparsers[''].add_parser(group, help=GROUPS[group], description=GROUPS[group])
            subparsers[group] = kinds.add_subparsers(metavar='KIND', required=True)
        about, add_arguments = declaration(command)
        first = about.partition('\n')[0].replace('%', '%%')
        options: dict[str, Any] = dict(description=about, formatter_class=RAW)
        add_arguments(subparsers[group].add_parser(name, help=first, **options))
    return parser


def refuse_kind(group: str, kind: str) -> NoReturn:
    kinds = [command.partition(' ')[2] for command in COMMANDS if command.startswith(f'{group} ')]
    close = similar_names(kind, kinds)
    hint = f'; did you mean {close[0]}?' if close else ''
    raise SystemExit(f'Error: KIND must be one of {", ".join(kinds)}, got {kind!r}{hint}')


def run(command: str, args: argparse.Namespace) -> None:
    with user_errors():
        check_args(args)
    if command not in COMMANDS:
        with user_errors():
            module_of_others(command).run(args)
        return
    try:
        module = importlib.import_module(f'aft_mm.{COMMANDS[command]}')
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
        module.run(args)
    except MemoryError:
        refuse_memory(command)


def check_args(args: argparse.Namespace) -> None:
    """Check pictures, files and folders, and find the config, before torch is imported."""
    if 'dpi' in args:
        check_picture(args)
    if 'config' in args:
        name, args.config = args.config, find_config(args.config)
        if 'takes_own_weights' in args:
            choose_weights(args, name)
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
