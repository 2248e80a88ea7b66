"""Errors that a user can fix: reported as one line, without a traceback."""

import linecache
import os
import pickle
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
#: Beginning of the message of a process that another one ended.
PEER_DIED = 'another process of the run has died'
DAMAGED = 'it is damaged or of another kind than its name says'
LONGEST_NAME = 300  # characters of a path in a message
# Packages that receive user input; ops count as layers.
TAKES_INPUT = ('checks', 'datasets', 'images', 'layers', 'models')
#: End of a message about an unknown argument.
INHERITED = 'one that a base gave goes with _delete_=True in the dict'
# Of mmengine, which continues with an address, and of Python.
_UNKNOWN_TYPE = re.compile(r'(\S+) is not in the \S+::(.+?) registry')
_UNKNOWN_ARGUMENT = '__init__() got an unexpected keyword argument'
#: Cutoff of get_close_matches: two of ten letters differ.
SIMILARITY = 0.8
#: Errors of a config with a mistake.
CONFIG_ERRORS = (
    *(TypeError, ValueError, KeyError, AssertionError, OSError, SyntaxError),
    *(AttributeError, ImportError),
)
#: Errors when a data set is built; mmpretrain raises a RuntimeError if it is empty.
DATA_ERRORS = (*CONFIG_ERRORS, RuntimeError, EOFError)


class UserError(ValueError):
    """The config, the data or a file cannot be used; the message is one line."""


def missing_package(error: ImportError, module: str, package: str) -> ImportError:
    """Return the error to raise where `module` imports `package`, an extra of the same name."""
    name = error.name or ''
    if name.partition('.')[0] != package:
        return error
    command = f'which pip install aft_mm[{package}] installs'
    if name == package and isinstance(error, ModuleNotFoundError):
        return ModuleNotFoundError(f'{module} needs {package}, {command}', name=package)
    return ImportError(f'{module} needs another version of {package}, {command}: {error}')


def import_from_extra(module: str, extra: str, user: str) -> Any:
    """Return a module that an extra of aft_mm installs.

    Raises:
        UserError: It is missing; the message names its `user` and the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or module).partition('.')[0]
        raise UserError(f'{user} {package}, which pip install aft_mm[{extra}] installs') from error


class UnusableFile(UserError):  # noqa: N818 - not always an error
    """A file that cannot become a sample; training replaces it."""


def reason_of(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        is_link = error.filename is not None and os.path.islink(error.filename)
        return 'it is a link to a missing file' if is_link else 'it does not exist'
    if isinstance(error, MemoryError):
        return 'it needs more memory than there is'
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return DAMAGED


def quoted(path: str | os.PathLike) -> str:
    """Return a path between quotes for a message, shortened if long."""
    text = repr(os.fspath(path))
    return text if len(text) <= LONGEST_NAME else f'{text[:LONGEST_NAME]}…'


@contextmanager
def user_errors(*errors: type[Exception]) -> Iterator[None]:
    """Exit with a one-line message instead of a traceback if the user can fix the error.

    That is a :class:`UserError`, a refused checkpoint, a ValueError that aft_mm raises, or one of
    `errors`.
    """
    expected: tuple[type[Exception], ...] = (ValueError, *errors)
    try:
        yield
    except (UserError, pickle.UnpicklingError) as error:
        raise SystemExit(f'Error: {origin(error)[0].strip()}') from None
    except expected as error:
        message, file, line = origin(error)
        part = raising_part(file, line)
        if not isinstance(error, errors) and part not in TAKES_INPUT:
            raise
        message = ' '.join(message.split())  # some span several lines
        location = '' if part else f' ({type(error).__name__} at {file}:{line})'
        if unknown := _UNKNOWN_TYPE.search(message):
            message, location = f'type {unknown[0]}; {_meant(*unknown.groups())}', ''
        elif isinstance(error, TypeError) and _UNKNOWN_ARGUMENT in message:
            message = f'{message}; {INHERITED}'
        raise SystemExit(f'Error: {message}{location}') from None


def unknown_argument(owner: str, name: str, known: Sequence[str]) -> TypeError:
    close = get_close_matches(name, known, n=1, cutoff=SIMILARITY)
    hint = f'did you mean {close[0]!r}?' if close else INHERITED
    return TypeError(f'{owner} has no argument {name!r}, only {", ".join(known)}; {hint}')


def _meant(name: str, kind: str) -> str:
    """Return a hint at the type of aft_mm that is called like an unknown one of a registry."""
    ours: set[str] = set()
    for registry in vars(import_module('aft_mm.registry')).values():
        if getattr(registry, 'name', None) == kind:
            registry.import_from_location()
            ours |= registry.module_dict.keys()
    close = get_close_matches(name.rpartition('.')[2], ours, n=1, cutoff=SIMILARITY)
    return (
        f"did you mean 'aft_mm.{close[0]}'?"
        if close
        else 'check its name, or list its module in custom_imports'
    )


def origin(error: Exception) -> tuple[str, str, int]:
    """Return message, file and line of the raising statement, also from a data loader worker."""
    message = str(error.args[0] if isinstance(error, KeyError) else error)
    if 'Original Traceback' in message:  # torch's text of an error in a worker
        file, line = re.findall(r'^  File "(.+)", line (\d+)', message, re.M)[-1]
        # The class may be printed with its module.
        return re.split(rf'\n(?:\w+\.)*{type(error).__name__}: ', message)[-1], file, int(line)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return message, frame.filename, frame.lineno or 0


def raising_part(file: str, line: int) -> str:
    """Return the part of aft_mm with this ``raise`` statement, such as ``'layers'``, else ''."""
    path = Path(file)
    if PACKAGE in path.parents and linecache.getline(file, line).lstrip().startswith('raise '):
        return path.relative_to(PACKAGE).with_suffix('').parts[0]
    return ''
