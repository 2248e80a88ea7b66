"""Checks of error messages."""

import pytest


def refuses(message, function, *args, **options):
    """Check that a call raises a ValueError of one line that matches `message`."""
    with pytest.raises(ValueError, match=message) as error:
        function(*args, **options)
    assert '\n' not in str(error.value)
