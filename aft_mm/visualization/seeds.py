"""Means over seeds with their standard errors, as a table and as a picture."""

import math
import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

# Beyond it a number is rounding noise of the sums behind the metric.
MOST_DECIMALS = 8


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error of the mean, s / √n with the sample deviation s; None for n = 1."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def difference_and_error(
    values: Sequence[float],
    reference: Sequence[float],
) -> tuple[float, float | None]:
    """Difference of two means and its standard error after Welch, √(se₁² + se₂²).

    The error is None where one of the means has none.
    """
    (mean, error), (other, other_error) = mean_and_error(values), mean_and_error(reference)
    known = error is not None and other_error is not None
    return mean - other, math.hypot(error, other_error) if known else None


def seed_table(groups: Mapping[str, Sequence[float]], label: str) -> str:
    """A Markdown table: a row per group, with the difference to the first one.

    Numbers end where the second digit of the smallest standard error stands. What needs two runs
    and has one is a dash.

    Args:
        groups: Name to the values of its runs, one per seed.
        label: What is measured, with its unit.

    Raises:
        ValueError: There is no group, or one is empty.
    """
    _check_groups(groups)
    first, *_ = groups
    rows = [
        (
            name.replace('|', r'\|'),
            len(values),
            *mean_and_error(values),
            *((None, None) if name == first else difference_and_error(values, groups[first])),
        )
        for name, values in groups.items()
    ]
    decimals = decimals_of([row[3] for row in rows], [row[2] for row in rows])
    lines = [
        f'| group | n | {label}, mean | standard error | difference to {rows[0][0]} | its '
        'standard error |',
        '| --- | ---: | ---: | ---: | ---: | ---: |',
    ]
    for name, count, mean, error, difference, difference_error in rows:
        cells = [
            name,
            str(count),
            *(
                '–' if number is None else f'{number:{sign}.{decimals}f}'
                for number, sign in (
                    (mean, ''),
                    (error, ''),
                    (difference, '+'),
                    (difference_error, ''),
                )
            ),
        ]
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines) + '\n'


def draw_seeds(
    groups: Mapping[str, Sequence[float]],
    label: str,
    numbers: str | None = None,
) -> Figure:
    """Draw the mean of each group with a bar of one standard error to both sides, and its runs.

    Groups stand below one another in their order, a dashed line at the mean of the first. Where
    their names are numbers, such as windows, they may stand on a logarithmic axis instead; then a
    0 stands on a linear piece at its left end.

    Args:
        groups: Name to the values of its runs, one per seed. A single run has no bar.
        label: What is measured, with its unit: the title of the axis of values.
        numbers: The title of the axis of numbers; None leaves names as they are.

    Returns:
        A figure with an Agg canvas of its own, for ``figure.savefig(path)``.

    Raises:
        ValueError: There is no group, one is empty, or ``numbers`` is given and a name is no
            number of 0 or larger, or two are the same number.
    """
    _check_groups(groups)
    places = range(len(groups)) if numbers is None else _numbers(groups)
    size = (7, 0.4 * len(groups) + 1.2) if numbers is None else (7, 4.5)
    figure = Figure(figsize=size, layout='constrained')
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for place, values in zip(places, groups.values(), strict=True):
        mean, error = mean_and_error(values)
        x, y = (mean, place) if numbers is None else (place, mean)
        runs, along = list(values), [place] * len(values)
        axis.plot(
            *((runs, along) if numbers is None else (along, runs)),
            'o',
            color='grey',
            alpha=0.5,
            markersize=3,
            zorder=1,
        )
        bar = {'xerr' if numbers is None else 'yerr': error}
        axis.errorbar(x, y, **bar, fmt='o', color='C0', markersize=4, capsize=4, zorder=2)
    if numbers is None:
        _name_groups(axis, groups, label)
    else:
        _number_groups(axis, groups, dict(zip(places, groups, strict=True)), label, numbers)
    axis.grid(alpha=0.3)
    axis.set_title('blue: mean ± standard error, grey: runs', fontsize=8)
    return figure


def _check_groups(groups: Mapping[str, Sequence[float]]) -> None:
    """Refuse to count nothing.

    Raises:
        ValueError: There is no group, or one is empty.
    """
    if not groups:
        raise ValueError('groups must hold at least one group of runs, but it is empty.')
    for name, values in groups.items():
        if not values:
            raise ValueError(f'groups must hold at least one run each, but {name!r} is empty.')


def decimals_of(errors: Sequence[float | None], means: Sequence[float]) -> int:
    """Digits after the point: two of the smallest error, or four of the smallest mean."""
    known = [error for error in errors if error]
    sizes = known or [abs(mean) for mean in means if mean] or [1.0]
    digits = 2 if known else 4
    return min(MOST_DECIMALS, max(0, digits - 1 - math.floor(math.log10(min(sizes)))))


def _numbers(names: Mapping[str, Sequence[float]]) -> list[float]:
    """The names as numbers."""
    places = []
    for name in names:
        try:
            places.append(float(name))
        except ValueError:
            places.append(math.nan)
        if not 0 <= places[-1] < math.inf:
            raise ValueError(
                'groups on an axis of numbers must be named by numbers, 0 or larger, '
                f'but one is {name!r}.'
            )
    if len(set(places)) < len(places):
        raise ValueError(
            'groups on an axis of numbers must be named by numbers that differ, but '
            f'they are {", ".join(names)}.'
        )
    return places


def _name_groups(axis: Axes, groups: Mapping[str, Sequence[float]], label: str) -> None:
    """Values to the right, groups downwards: names of any length stand beside one another."""
    axis.axvline(
        mean_and_error(next(iter(groups.values())))[0],
        color='C0',
        linestyle='--',
        linewidth=1,
        alpha=0.5,
        zorder=0,
    )
    axis.set_yticks(range(len(groups)), list(groups))
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.set_xlabel(label)


def _number_groups(
    axis: Axes,
    groups: Mapping[str, Sequence[float]],
    names: Mapping[float, str],
    label: str,
    title: str,
) -> None:
    """Numbers to the right, values upwards, a line through the means."""
    places = sorted(names)
    axis.plot(
        places,
        [mean_and_error(groups[names[place]])[0] for place in places],
        color='C0',
        linewidth=1,
        alpha=0.4,
        zorder=0,
    )
    positive = [place for place in places if place]
    if len(positive) == len(places):
        axis.set_xscale('log')
    elif positive:
        axis.set_xscale('symlog', linthresh=positive[0])
    axis.set_xticks(places, [names[place] for place in places])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(title)
    axis.set_ylabel(label)
