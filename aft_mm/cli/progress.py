"""Progress bars of the tools."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar('Item')


def progress(items: Sequence[Item], description: str) -> Iterator[Item]:
    """Iterate over ``items`` with a bar on stderr that shows the remaining time."""
    yield from track(items, description, console=Console(stderr=True))
