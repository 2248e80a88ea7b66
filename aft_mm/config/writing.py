"""Values in the text of a config, in which mmengine replaces ``{{...}}`` before Python reads it."""

import os
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # mmengine imports torch, which takes seconds
    from mmengine.config import Config


class Literal(str):
    """A text whose ``repr`` is a Python literal without braces, and whose format the inside of one.

    mmengine writes the key of a dict between single quotes as it is formatted.
    """

    def __repr__(self) -> str:
        return super().__repr__().replace('{', r'\x7b').replace('}', r'\x7d')

    def __format__(self, spec: str) -> str:
        # A double quote inside makes Python choose single quotes outside.
        return repr(Literal(f'"{str(self)}'))[2:-1]


def literal(value: str | os.PathLike) -> str:
    return repr(Literal(os.fspath(value)))


def quotable(text: str) -> str:
    """Return what yields `text` between quotes of either kind in a config."""
    return format(Literal(text)).replace('"', r'\"')


def config_text(config: 'Config', write: 'Callable[[Config], str]') -> str:
    """Return the text of a config as `write`, mmengine's ``pretty_text``, but without ``{{``."""
    written = copy(config)
    values = type(config._cfg_dict)(_with_literals(config.to_dict()))
    object.__setattr__(written, '_cfg_dict', values)  # else it would be an entry of the config
    return write(written)


def _with_literals(value: Any) -> Any:
    if isinstance(value, dict):
        return {_with_literals(key): _with_literals(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return kind(map(_with_literals, value))
    return Literal(os.fspath(value)) if isinstance(value, str | os.PathLike) else value
