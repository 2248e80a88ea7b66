"""Checks of error messages."""

import pytest


def exits(message, function, *args, **options):
    """Check that a command ends with a message of one line that matches `message`."""
    with pytest.raises(SystemExit, match=message) as error:
        function(*args, **options)
    assert '\n' not in str(error.value)


def refuses(message, function, *args, **options):
    """Check that a call raises a ValueError of one line that matches `message`."""
    with pytest.raises(ValueError, match=message) as error:
        function(*args, **options)
    assert '\n' not in str(error.value)
