"""Text files of the user: lists of names and numbers by name."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

from aft_mm.errors import UserError


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
