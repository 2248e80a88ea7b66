"""Checks of error messages."""

import pytest

from aft_mm.errors import UserError


def refuses(message, function, /, *args, **options):
    """Check that a call raises a ValueError of one line that matches `message`."""
    _raises(ValueError, message, function, args, options)


def refuses_input(message, function, /, *args, **options):
    """Check that a call raises a UserError of one line that matches `message`."""
    _raises(UserError, message, function, args, options)


def refuses_value(name, function, /, *args, **options):
    """Check that a call raises a ValueError of one short line on the value of an argument."""
    message = _raises(ValueError, f'^{name}.* (must|holds) ', function, args, options)
    assert len(message) < 300


def stops(message, function, /, *args, **options):
    """Check that a call ends the program with ``Error: `` and one line that matches `message`."""
    pattern = message if 'Error: ' in message else f'^Error: .*{message}'
    _raises(SystemExit, pattern, function, args, options)


def _raises(kind, message, function, args, options):
    with pytest.raises(kind, match=message) as error:
        function(*args, **options)
    assert '\n' not in str(error.value)
    return str(error.value)
