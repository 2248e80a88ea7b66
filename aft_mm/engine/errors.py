"""What a person did wrong, in one sentence; everything else keeps its traceback."""

import pickle
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """The config, the data or a file cannot be used; the message is one sentence."""


@contextmanager
def one_sentence(*errors: type[Exception]) -> Iterator[None]:
    """End the program with the message of a :class:`UserError` instead of a traceback.

    A refused checkpoint counts as one. ``errors`` are further types that mean a mistake of the
    user inside this block, such as a TypeError while a config is turned into objects; their
    message is followed by the place that raised it, because they may be ours.
    """
    try:
        yield
    except (UserError, pickle.UnpicklingError) as error:
        raise SystemExit(f'Error: {error}') from None
    except errors as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        message = error.args[0] if isinstance(error, KeyError) else error
        message = ' '.join(str(message).split())  # some span several lines
        raise SystemExit(f'Error: {message} ({type(error).__name__} at '
                         f'{place.filename}:{place.lineno})') from None
