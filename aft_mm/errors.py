"""What a person did wrong, in one sentence; everything else keeps its traceback."""

import linecache
import pickle
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).parent
#: How the sentence of a process begins that ended because another one did.
PEER_DIED = 'another process of the run has died'
# What input reaches. The ops are called by our layers only, so that their errors are ours too.
TAKES_INPUT = ('checks', 'datasets', 'layers', 'models')


class UserError(ValueError):
    """The config, the data or a file cannot be used; the message is one sentence."""


@contextmanager
def one_sentence(*errors: type[Exception]) -> Iterator[None]:
    """End the program with the message of a :class:`UserError` instead of a traceback.

    A refused checkpoint counts as one, and so does a ValueError that aft_mm's data sets, layers or
    models raise on purpose, also in a worker of a data loader: these are about what they were
    given. ``errors`` are further types that mean a mistake of the user inside this block, such as a
    TypeError while a config is turned into objects; unless aft_mm raised it on purpose, their
    message is followed by the place that raised it, because they may be bugs.
    """
    expected: tuple[type[Exception], ...] = (ValueError, *errors)
    try:
        yield
    except (UserError, pickle.UnpicklingError) as error:
        raise SystemExit(f'Error: {error}') from None
    except expected as error:
        message, file, line = origin(error)
        part = raising_part(file, line)
        if not isinstance(error, errors) and part not in TAKES_INPUT:
            raise
        message = ' '.join(message.split())  # some span several lines
        place = '' if part else f' ({type(error).__name__} at {file}:{line})'
        raise SystemExit(f'Error: {message}{place}') from None


def origin(error: Exception) -> tuple[str, str, int]:
    """Message, file and line of the statement that raised, maybe in a worker of a data loader."""
    message = str(error.args[0] if isinstance(error, KeyError) else error)
    if 'Original Traceback' in message:  # torch's text of a worker's error
        file, line = re.findall(r'^  File "(.+)", line (\d+)', message, re.M)[-1]
        # An exception class of a module stands there with the module's name.
        return re.split(rf'\n(?:\w+\.)*{type(error).__name__}: ', message)[-1], file, int(line)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return message, place.filename, place.lineno or 0


def raising_part(file: str, line: int) -> str:
    """The part of aft_mm, such as ``'layers'``, whose statement ``raise`` this is; '' for none."""
    path = Path(file)
    if PACKAGE in path.parents and linecache.getline(file, line).lstrip().startswith('raise '):
        return path.relative_to(PACKAGE).with_suffix('').parts[0]
    return ''
