"""Names of cases that are the same in every process: xdist compares them between its workers."""

from torch import Tensor


def short(value) -> str:
    """What a parameter of a test is, without addresses and without random numbers."""
    if isinstance(value, Tensor):
        return f'{value.dtype} {list(value.shape)}'
    if isinstance(value, dict):
        return ', '.join(f'{name}={short(item)}' for name, item in value.items())[:50]
    if callable(value):
        return value.__name__
    return str(value)[:50]
