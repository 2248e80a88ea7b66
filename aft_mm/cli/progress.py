"""Progress bars of the tools."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar('Item')


def progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Iterate over ``items`` with a bar on stderr that shows the remaining time."""
    yield from track(items, description, total, console=Console(stderr=True))
