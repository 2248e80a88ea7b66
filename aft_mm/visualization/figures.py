"""Helpers shared by the figures: canvas, colours, selection of heads and layers."""

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from aft_mm.checks import is_int, refuse

NARROWEST = 4.2  # inches, so that the title fits
#: Most panels per row; more become tiles of one picture.
MOST_PANELS = 24
LONGEST = 60  # characters of a name

Choice = str | Sequence[int]


def printable(text: str) -> str:
    """Return a text with ``?`` for control characters and halves of others, which fonts refuse."""
    return ''.join(
        letter if letter.isprintable() or letter == '\n' else ' ' if letter.isspace() else '?'
        for letter in text
    )


def plain(text: str) -> str:
    """Return a text that matplotlib plots as it is, in a legend, too.

    ``$`` would begin a formula, and an empty label or one that begins with ``_`` is left out.
    """
    text = printable(text).replace('$', r'\$')
    return f' {text}' if text.startswith('_') or not text else text


def plain_name(text: str) -> str:
    """Return :func:`plain` of a name, shortened to :data:`LONGEST` characters in one line."""
    line = ' '.join(text.split())
    return plain(line if len(line) <= LONGEST else f'{line[: LONGEST - 1]}…')


def literal_text() -> AbstractContextManager:
    """Return a context in which matplotlib takes no text for a formula."""
    return rc_context({'text.parse_math': False})


def _png(figure: Figure) -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format='png')
    return png.getvalue()


def new_figure(width: float, height: float, title: str = '', footer: str = '') -> Figure:
    """Create an empty figure with its own Agg canvas, which needs no display and no ``pyplot``.

    A notebook displays it as the value of a cell.

    Args:
        width, height: Inches; the width is at least :data:`NARROWEST`.
        title: Text above the figure.
        footer: Small print below the figure.
    """
    figure: Any = Figure(figsize=(max(NARROWEST, width), height), layout='constrained')
    FigureCanvasAgg(figure)
    # No subclass, which other libraries would not take for a figure of matplotlib.
    figure._repr_png_ = partial(_png, figure)
    if title:
        figure.suptitle(plain(title), fontsize=9)
    if footer:
        figure.supxlabel(plain(footer), x=0.01, ha='left', fontsize=5, color='dimgrey')
    return figure


def choose(
    name: str, choice: Choice, among: int | Sequence[int], most: int | None = None
) -> list[int]:
    """Return the indices of the heads, layers or tokens to plot.

    Args:
        name: Name of the argument, for the message.
        choice: ``'all'``, ``'first:16'``, ``'even:12'`` (evenly spaced), ``'0,3,7'`` or ints.
        among: Number to choose from, or the ascending indices.
        most: Maximum number to choose; None for any number.
    """
    indices = range(among) if isinstance(among, int) else among
    chosen = _parse(choice, indices) if isinstance(choice, str) else list(choice)
    if not chosen or not all(is_int(index) and index in indices for index in chosen):
        some = f'0 to {len(indices) - 1}'
        if list(indices) != list(range(len(indices))):
            some = ', '.join(map(str, indices))
        example = ','.join(map(str, indices[:3]))
        refuse(name, f"'all', 'first:N', 'even:N' or some of {some} as in '{example}'", choice)
    if most is not None and len(chosen) > most:
        raise ValueError(
            f'{name} must choose at most {most} panels for a row, such as '
            f"'even:12', got {choice!r}, which chooses {len(chosen)}"
        )
    return chosen


def _parse(choice: str, indices: Sequence[int]) -> list[int]:
    word, _, number = choice.partition(':')
    if choice == 'all':
        return list(indices)
    if word in ('first', 'even') and number.isdecimal():
        limit = min(len(indices), int(number))
        even = np.linspace(0, len(indices) - 1, limit).round().astype(int).tolist()
        return list(indices[:limit]) if word == 'first' else [indices[i] for i in sorted(set(even))]
    numbers = choice.split(',')
    return [int(number) for number in numbers] if all(map(str.isdecimal, numbers)) else []


#: The first colours, which people of most kinds of colour vision can tell apart.
COLOURS = (
    (230, 159, 0),
    (86, 180, 233),
    (0, 158, 115),
    (204, 121, 167),
    (0, 114, 178),
    (213, 94, 0),
    (240, 228, 66),
    (153, 153, 153),
)
_GREYISH = 64  # smallest range of the channels of further colours


@cache
def class_colours(number: int) -> np.ndarray:
    """Return different colours, uint8 [number, 3]: each the farthest from those before it."""
    grid = np.stack(np.meshgrid(*[np.linspace(0, 255, 8)] * 3), axis=-1).reshape(-1, 3)
    grid = grid[np.ptp(grid, axis=1) >= _GREYISH]
    colours = np.array(COLOURS, float)
    nearest = np.linalg.norm(grid[:, None] - colours, axis=-1).min(1)
    while len(colours) < number:
        colour = grid[nearest.argmax()]
        colours = np.vstack([colours, colour])
        nearest = np.minimum(nearest, np.linalg.norm(grid - colour, axis=-1))
    return colours[:number].astype(np.uint8)
