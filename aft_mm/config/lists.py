"""Lists of names, one on each line."""

from io import StringIO
from pathlib import Path

from aft_mm.errors import UserError


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding='utf-8-sig')
    except UnicodeDecodeError as error:
        raise UserError(f'{str(path)!r} is not valid UTF-8 in byte {error.start}') from error


def read_lines(path: str | Path) -> list[str]:
    """Return the lines of a list without outer spaces; like mmengine, end lines at ``\\n`` only."""
    return [line.strip() for line in StringIO(read_text(path))]
