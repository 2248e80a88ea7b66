from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

Item = TypeVar('Item')


def progress(
    items: Iterable[Item], description: str, total: int | None = None, shown: bool = True
) -> Iterator[Item]:
    """Iterate over ``items`` with a bar on stderr, which an error removes."""
    with Progress(console=Console(stderr=True), disable=not shown) as bar:
        try:
            yield from bar.track(items, total, description=description)
        except BaseException:
            bar.live.transient = True
            raise
