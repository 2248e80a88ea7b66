"""Student and Welch intervals over seeds, and their verdict on an expected sign.

A verdict is about these runs, not about a paper.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .run_logs import decimals_of, mean_and_error

LEVEL = 0.95
SAME, OPPOSITE, INCONCLUSIVE = 'same sign here', 'opposite sign here', 'inconclusive'


class Difference(NamedTuple):
    """Difference of two means by Welch's t; interval and p are None where a group has one run."""

    mean: float
    interval: tuple[float, float] | None
    p: float | None


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return Student's interval of the mean; None for a single value or equal ones."""
    from scipy.stats import t

    mean, error = mean_and_error(values)
    # Student's interval of equal values is not defined.
    return t.interval(LEVEL, len(values) - 1, mean, error) if error else None


def difference(values: Sequence[float], reference: Sequence[float]) -> Difference:
    """Return the mean of values minus that of the reference, after Welch."""
    from scipy.stats import ttest_ind

    (mean, error), (other_mean, other_error) = mean_and_error(values), mean_and_error(reference)
    mean -= other_mean
    if (
        error is None or other_error is None or not (error or other_error)
    ):  # runs that are all equal have no known variance
        return Difference(mean, None, None)
    test = ttest_ind(values, reference, equal_var=False)
    return Difference(mean, tuple(test.confidence_interval(LEVEL)), float(test.pvalue))


def verdict(measured: Difference, sign: str) -> str:
    """Compare the sign of a difference with '+' or '-' if the 95 % interval excludes 0.

    Intervals are not corrected for the number of comparisons.
    """
    if measured.p is None or measured.p >= 1 - LEVEL:
        return INCONCLUSIVE
    return SAME if (measured.mean > 0) == (sign == '+') else OPPOSITE


def verdict_table(
    groups: Mapping[str, Sequence[float]], label: str, expected: Mapping[str, str] | None = None
) -> str:
    """Return a Markdown table, one row per group, each compared with the first group.

    ``expected`` are the signs of the differences, '+' or '-'.
    """
    first, *others = groups
    if unknown := set(expected or {}) - set(others):
        raise ValueError(
            f'expected must name groups after the first, {", ".join(others) or "of which there is none"}'
            f', got {", ".join(sorted(unknown))}'
        )
    means, errors = zip(*map(mean_and_error, groups.values()), strict=True)
    decimals = decimals_of(errors, means)
    header = ['group', 'n', label, f'difference from {_escape(first)}', 'p']
    lines = [[*header, 'verdict'] if expected else header]
    lines.append(['---', *['---:'] * 4, *(['---'] if expected else [])])
    for name, values in groups.items():
        cells = [_escape(name), str(len(values))]
        cells += [_with_half(statistics.mean(values), mean_interval(values), f'.{decimals}f')]
        if name == first:
            cells += ['–'] * (3 if expected else 2)
        else:
            measured = difference(values, groups[first])
            cells += [_with_half(measured.mean, measured.interval, f'+.{decimals}f')]
            if measured.p is None:
                cells.append('–')
            else:
                cells.append('< 0.0001' if measured.p < 1e-4 else f'{measured.p:.2g}')
            if expected:
                cells += [verdict(measured, expected[name]) if name in expected else '–']
        lines.append(cells)
    return ''.join(f'| {" | ".join(cells)} |\n' for cells in lines)


def _with_half(mean: float, interval: tuple[float, float] | None, spec: str) -> str:
    if interval is None:
        return f'{mean:{spec}}'
    return f'{mean:{spec}} ± {(interval[1] - interval[0]) / 2:{spec.removeprefix("+")}}'


def _escape(name: str) -> str:
    return name.replace('|', r'\|')
