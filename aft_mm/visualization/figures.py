"""Helpers shared by the figures: canvas, selection of heads and layers, colours, tiles."""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from aft_mm.checks import is_int, refuse

NARROWEST = 4.2  # inches, so that the title fits
#: Maximum number of panels per row with their own axes; more become tiles of one picture.
MOST_PANELS = 24
LARGEST_RATIO = 1e4  # the colour scale of ratios ends there and at its inverse

Choice = str | Sequence[int]


def new_figure(width: float, height: float, title: str = '', footer: str = '') -> Figure:
    """Create an empty figure with its own Agg canvas.

    ``figure.savefig(path)`` needs no display and does not change the backend of ``pyplot``.

    Args:
        width: Inches, at least :data:`NARROWEST`.
        height: Inches.
        title: Text above the figure.
        footer: Small print below the figure, such as the names of config and checkpoint.
    """
    figure = Figure(figsize=(max(NARROWEST, width), height), layout='constrained')
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=9)
    if footer:
        figure.supxlabel(footer, x=0.01, ha='left', fontsize=5, color='dimgrey')
    return figure


def choose(name: str, choice: Choice, count: int, most: int | None = None) -> list[int]:
    """Return the indices of the heads, layers or tokens to draw.

    Args:
        name: Name of the argument, for the message.
        choice: ``'all'``, ``'first:16'``, ``'even:12'`` (evenly spaced with both ends), ``'0,3,7'``
            or a sequence of ints. ``first`` and ``even`` give fewer where there are fewer.
        count: Number to choose from.
        most: Maximum number to choose; None for any number.

    Raises:
        ValueError: ``choice`` has another form, an index is out of range, or there are too many.
    """
    chosen = _parse(choice, count) if isinstance(choice, str) else list(choice)
    if not chosen or not all(is_int(index) and 0 <= index < count for index in chosen):
        refuse(
            name, f"'all', 'first:N', 'even:N' or some of 0 to {count - 1} as in '0,3,7'", choice
        )
    if most is not None and len(chosen) > most:
        raise ValueError(
            f'{name} must choose at most {most} panels for a row, such as '
            f"'even:12', got {choice!r}, which chooses {len(chosen)}"
        )
    return chosen


def _parse(choice: str, count: int) -> list[int]:
    word, _, number = choice.partition(':')
    if choice == 'all':
        return list(range(count))
    if word in ('first', 'even') and number.isdecimal():
        limit = min(count, int(number))
        even = np.linspace(0, count - 1, limit).round().astype(int).tolist()
        return list(range(limit)) if word == 'first' else sorted(set(even))
    numbers = choice.split(',')
    return [int(number) for number in numbers] if all(map(str.isdecimal, numbers)) else []


def ratio_norm(values: Iterable[np.ndarray]) -> LogNorm:
    """Return the norm of a diverging colour map for ratios: 1 in the middle, symmetric in log scale.

    Its range covers the finite positive values, from at least 1.01 to at most 10⁴ and the inverse.
    """
    most = 1.01
    for ratio in values:
        known = ratio[np.isfinite(ratio) & (ratio > 0)]
        if known.size:
            most = max(most, float(known.max()), 1 / float(known.min()))
    most = min(most, LARGEST_RATIO)
    return LogNorm(1 / most, most)


def tile(pictures: np.ndarray, columns: int) -> np.ndarray:
    """Arrange pictures ``[N, h, w]`` in a grid with one line of NaN between neighbours."""
    count, height, width = pictures.shape
    rows = -(-count // columns)
    sheet = np.full((rows * columns, height + 1, width + 1), np.nan)
    sheet[:count, :-1, :-1] = pictures
    sheet = sheet.reshape(rows, columns, height + 1, width + 1).transpose(0, 2, 1, 3)
    return sheet.reshape(rows * (height + 1), columns * (width + 1))[:-1, :-1]


def label_tiles(axis: Axes, count: int, columns: int, height: int, numbers: Sequence[int]) -> None:
    """Label each row of :func:`tile` with the number of its first picture."""
    rows = range(-(-count // columns))
    axis.set_yticks(
        [row * (height + 1) + (height - 1) / 2 for row in rows],
        [str(numbers[row * columns]) for row in rows],
    )
    axis.set_xticks([])
    axis.tick_params(labelsize=6, length=0)
