"""Progress bars of the tools, in one style."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Item = TypeVar('Item')


def with_bar(items: Sequence[Item], description: str) -> Iterator[Item]:
    """Go through ``items`` behind a bar on stderr, with the time that is left."""
    yield from track(items, description, console=Console(stderr=True))
