"""Texts of the user, and values in the text of a config."""

import ast
import json
import math
import os
import unicodedata
from collections.abc import Callable
from copy import copy
from io import StringIO
from numbers import Real
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from aft_mm.errors import UserError

if TYPE_CHECKING:  # mmengine imports torch, which takes seconds
    from mmengine.config import Config

LONGEST = 2**18  # characters of a config


def type_name(kind: Any) -> str:
    """Return the last part of the name in a ``type``: a str, a class or a LazyObject of mmengine."""
    # A LazyObject has any attribute.
    name = kind.__name__ if isinstance(kind, type | FunctionType) else str(kind)
    return name.rpartition('.')[2]


def nfc(text: str) -> str:
    """Return a text with composed letters; macOS decomposes those of file names."""
    return unicodedata.normalize('NFC', text)


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding='utf-8-sig')
    except UnicodeDecodeError as error:
        raise UserError(f'{str(path)!r} is not valid UTF-8 in byte {error.start}') from error


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a list without outer spaces; like mmengine, end lines at ``\\n`` only."""
    return [line.strip() for line in StringIO(read_text(path))]


def read_json(path: str | Path, kind: str = '') -> Any:
    """Return the content of a JSON file; `kind` names it in an error, such as 'annotations '."""
    try:
        return json.loads(read_text(path))
    except OSError as error:
        raise UserError(f'{kind}{str(path)!r} cannot be read: {error.strerror}') from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        reason = ' '.join(str(error).split())
        raise UserError(f'{kind}{str(path)!r} is damaged or not JSON: {reason:.200}') from error


def read_table(path: str | Path) -> dict[str, Any]:
    """Return the metrics of a file of `aft_mm test --out`, or the rows of a benchmark."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(
            f'{str(path)!r} must hold metrics or rows by name, got a {type(content).__name__}'
        )
    return content


class Literal(str):
    """A text whose ``repr`` is a Python literal without braces, and whose format the inside of one.

    mmengine writes the key of a dict between single quotes as it is formatted.
    """

    def __repr__(self) -> str:
        return super().__repr__().replace('{', r'\x7b').replace('}', r'\x7d')

    def __format__(self, spec: str) -> str:
        # A double quote inside makes Python choose single quotes outside.
        return repr(Literal(f'"{str(self)}'))[2:-1]


class NonFinite(float):
    """A float whose ``repr`` is an expression; that of infinity is even a literal."""

    def __repr__(self) -> str:
        return "float('nan')" if math.isnan(self) else '-1e999' if self < 0 else '1e999'


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
    if isinstance(value, Real) and (value != value or value in (math.inf, -math.inf)):
        return NonFinite(value)
    return Literal(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


def assigned(config: str, variable: str) -> ast.expr | None:
    """Return the expression that the text of a config assigns to a variable, None if there is none."""
    try:
        statements = ast.parse(config).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # of a damaged text
        return None
    for statement in statements:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            if statement.targets[0].id == variable:
                return statement.value
    return None


class DictCalls(ast.NodeTransformer):
    """Write ``dict({'a.b': 1}, c=2)`` as ``{'a.b': 1, 'c': 2}``, which is a literal, and NaN."""

    def visit_Call(self, node: ast.Call) -> ast.AST:  # noqa: N802 - the name that ast calls
        self.generic_visit(node)
        if ast.unparse(node) == repr(NonFinite('nan')):
            return ast.Constant(math.nan)
        if ast.unparse(node.func) != 'dict' or len(node.args) > 1:
            return node
        first = node.args[0] if node.args else ast.Dict([], [])
        if not isinstance(first, ast.Dict):
            return node
        keys = [*first.keys, *(ast.Constant(word.arg) for word in node.keywords)]
        return ast.Dict(keys, [*first.values, *(word.value for word in node.keywords)])


def entry(config: str, name: str, kind: type = dict) -> Any:
    """Return a dict or list of the text of a config in a checkpoint, without running it.

    It is empty if there is none, or if the text is longer than that of any config: its syntax tree
    would take 400 times as much memory.
    """
    value = assigned(config, name) if len(config) <= LONGEST else None
    try:
        found = None if value is None else ast.literal_eval(DictCalls().visit(value))
    except (ValueError, TypeError, MemoryError, RecursionError):
        found = None
    return found if isinstance(found, kind) else kind()
