"""Checks of plain values, which raise ValueError ``NAME must be ALLOWED, got VALUE``."""

import errno
import math
import os
import stat
import sys
from collections.abc import Collection, Sequence
from numbers import Real
from typing import Any, NoReturn, TypeGuard

LONGEST_VALUE = 80
#: Validated samples below which an accuracy says almost nothing.
FEWEST_VALIDATED = 20


def is_int(value: Any) -> TypeGuard[int]:
    """Return whether the value is an int and not a bool, in an exported graph also a symbol or tensor."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    # Importing torch takes seconds; before that, no value is torch's.
    torch = sys.modules.get('torch')
    if torch is None:
        return False
    if isinstance(value, torch.Tensor):
        return torch.jit.is_tracing() and value.dtype == torch.int64 and value.dim() == 0
    return isinstance(value, torch.SymInt)


def refuse(name: str, allowed: str, value: Any) -> NoReturn:
    """Raise ``NAME must be ALLOWED, got VALUE``."""
    raise ValueError(f'{name} must be {allowed}, got {described(value)}')


def described(value: Any) -> str:
    """Return a short description of a value: arrays by dtype and shape."""
    torch = sys.modules.get('torch')
    if torch is not None and isinstance(value, torch.Tensor):
        return f'{value.dtype} {list(value.shape)}'
    if (type(value).__module__, type(value).__name__) == ('numpy', 'ndarray'):
        return f'a numpy array {value.dtype} {list(value.shape)}'  # without importing numpy
    words = ' '.join(repr(value).split())
    return words if len(words) <= LONGEST_VALUE else f'{words[:LONGEST_VALUE]}…'


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``'1 box'`` and ``'1,000 boxes'``."""
    several = 'es' if noun.endswith(('x', 's')) else 's'
    return f'{number:,} {noun}{several * (number != 1)}'


def _bounds(least: float | None, most: float | None) -> str:
    if least is None:
        return '' if most is None else f', {most} or smaller'
    if most is None:
        return f', {least} or larger'
    return f', {least} to {"2^63 − 1" if most == 2**63 - 1 else most}'


def check_int(name: str, value: Any, least: int | None = None, most: int | None = None) -> None:
    if (
        not is_int(value)
        or (least is not None and value < least)
        or (most is not None and value > most)
    ):
        refuse(name, f'an int{_bounds(least, most)}', value)


def check_number(
    name: str,
    value: Any,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
) -> None:
    """Check for a finite int or float above `above`, of at least `least` and at most `most`."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if (
        not is_number
        or not abs(value) < math.inf
        or (above is not None and value <= above)
        or (least is not None and value < least)
        or (most is not None and value > most)
    ):
        bounds = _bounds(least, most)
        if above is not None:
            bounds = f' above {above}' + ('' if most is None else f' and at most {most}')
        refuse(name, f'a finite number{bounds}', value)


def check_probability(name: str, value: Any) -> None:
    check_number(name, value, 0, 1)


def check_flag(name: str, value: Any) -> None:
    """Check for a bool: any string would be true, and a 0 may be a misplaced number."""
    if not isinstance(value, bool):
        refuse(name, 'True or False', value)


def check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        names = ', '.join(choice or repr(choice) for choice in allowed)
        refuse(name, f'one of {names}', value)


def check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        refuse(name, 'a string that is not empty', value)


def check_encodable(name: str, value: str) -> None:
    """Check for a text without lone surrogates, which Python makes of other bytes on a command line."""
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(name, 'valid UTF-8', value)


def check_path(name: str, value: Any) -> None:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        refuse(name, 'the path of a file or folder', value)


def check_regular(path: str | os.PathLike) -> int:
    """Return the size of a file [bytes].

    Raises:
        OSError: If it is missing, a folder, a pipe or a device.
    """
    if '\0' in os.fspath(path):
        raise OSError(0, 'its name has a zero byte')
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, 'it is not a regular file')
    return status.st_size


def check_sizes(name: str, value: Any, dims: Collection[int]) -> None:
    """Check for a sequence of positive ints, whose length is one of `dims`."""
    right_length = isinstance(value, Sequence) and len(value) in dims
    if not right_length or not all(is_int(size) and size >= 1 for size in value):
        refuse(name, f'{" or ".join(map(str, dims))} ints{_bounds(1, None)}', value)


def per_dimension(name: str, value: Any, dims: int, least: int = 1) -> tuple[int, ...]:
    """Return the sizes of a window or kernel, one per dimension; an int means all of them."""
    if is_int(value) and value >= least:
        return (value,) * dims
    right_length = isinstance(value, Sequence) and len(value) == dims
    if not right_length or not all(is_int(size) and size >= least for size in value):
        several = '' if dims == 1 else f' or {dims} ints'
        refuse(name, f'an int{several}{_bounds(least, None)}', value)
    return tuple(value)


def check_config(name: str, value: Any) -> None:
    """Check for the config of a component, a dict with its type."""
    if not isinstance(value, dict) or not isinstance(value.get('type'), (str, type)):
        refuse(name, "a dict with a type, such as dict(type='aft_mm.AFTSimple')", value)
