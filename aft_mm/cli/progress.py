"""Progress bars of the tools."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress

Item = TypeVar('Item')


def progress(items: Iterable[Item], description: str, total: int | None = None) -> Iterator[Item]:
    """Iterate over ``items`` with a bar on stderr that shows the remaining time.

    If ``items`` raises an error, the bar is removed so that only the message is left.
    """
    with Progress(console=Console(stderr=True)) as bar:
        try:
            yield from bar.track(items, total, description=description)
        except BaseException:
            bar.live.transient = True
            raise
