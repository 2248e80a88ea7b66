"""Names of test cases that are equal in every process, as xdist requires."""

from torch import Tensor


def short(value) -> str:
    if isinstance(value, Tensor):
        return f'{value.dtype} {list(value.shape)}'
    if isinstance(value, dict):
        return ', '.join(f'{name}={short(item)}' for name, item in value.items())[:50]
    if callable(value):
        return value.__name__
    return str(value)[:50]
