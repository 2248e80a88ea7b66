import argparse
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from aft_mm.config.lists import read_table
from aft_mm.errors import UserError, user_errors
from aft_mm.outputs import check_writable
from aft_mm.visualization.figures import new_figure, plain

from .run_files import is_selection, selected
from .run_logs import mean_and_error
from .verdicts import verdict_table


def draw_seeds(
    groups: Mapping[str, Sequence[float]], label: str, numbers: str | None = None
) -> Figure:
    """Plot mean ± standard error of each group, and its runs, one value per seed.

    With ``numbers``, the label of an x axis, the names of the groups are numbers on it.
    """
    positions = range(len(groups)) if numbers is None else _numbers(groups)
    size = (7, 0.4 * len(groups) + 1.2) if numbers is None else (7, 4.5)
    figure = new_figure(*size)
    axis = figure.subplots()
    for position, values in zip(positions, groups.values(), strict=True):
        mean, error = mean_and_error(values)
        x, y = (mean, position) if numbers is None else (position, mean)
        runs, along = list(values), [position] * len(values)
        points = (runs, along) if numbers is None else (along, runs)
        axis.plot(*points, 'o', color='grey', alpha=0.5, markersize=3, zorder=1)
        bar: dict[str, Any] = {'xerr' if numbers is None else 'yerr': error}
        axis.errorbar(x, y, **bar, fmt='o', color='C0', markersize=4, capsize=4, zorder=2)
    if numbers is None:
        _name_groups(axis, groups, label)
    else:
        _number_groups(axis, groups, dict(zip(positions, groups, strict=True)), label, numbers)
    axis.grid(alpha=0.3)
    axis.set_title('blue: mean ± standard error, grey: runs', fontsize=8)
    return figure


def _numbers(names: Mapping[str, Sequence[float]]) -> list[float]:
    places = []
    for name in names:
        try:
            places.append(float(name))
        except ValueError:
            places.append(math.nan)
        if not 0 <= places[-1] < math.inf:
            raise UserError(f'--numbers needs groups named by numbers, 0 or larger, got {name!r}')
    if len(set(places)) < len(places):
        raise UserError(
            f'--numbers needs groups named by different numbers, got {", ".join(names)}'
        )
    return places


def _name_groups(axis: Axes, groups: Mapping[str, Sequence[float]], label: str) -> None:
    first, _ = mean_and_error(next(iter(groups.values())))
    axis.axvline(first, color='C0', linestyle='--', linewidth=1, alpha=0.5, zorder=0)
    axis.set_yticks(range(len(groups)), list(map(plain, groups)))
    axis.set_ylim(len(groups) - 0.5, -0.5)
    axis.set_xlabel(plain(label))


def _number_groups(
    axis: Axes,
    groups: Mapping[str, Sequence[float]],
    names: Mapping[float, str],
    label: str,
    title: str,
) -> None:
    positions = sorted(names)
    means = [mean_and_error(groups[names[position]])[0] for position in positions]
    axis.plot(positions, means, color='C0', linewidth=1, alpha=0.4, zorder=0)
    positive = [position for position in positions if position]
    if len(positive) == len(positions):
        axis.set_xscale('log')
    elif positive:
        axis.set_xscale('symlog', linthresh=positive[0])
    axis.set_xticks(positions, [plain(names[position]) for position in positions])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(plain(title))
    axis.set_ylabel(plain(label))


def finite(source: str, metrics: Mapping, metric: str) -> float:
    if metric not in metrics:
        raise UserError(
            f'{source!r} has no metric {metric!r}; it holds {", ".join(metrics) or "none at all"}'
        )
    value = metrics[metric]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f'{metric} of {source!r} must be a finite number, got {value!r}')
    return value


def tested(file: str) -> dict[str, Mapping]:
    if is_selection(file):
        return {source: run['metrics'] for source, run in selected(file).items()}
    return {file: read_table(file)}


def read_groups(arguments: Sequence[Sequence[str]], metric: str) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = {}
    paths: set[str] = set()
    for label, *files in arguments:
        # If the label was forgotten, the first file would be taken for it.
        if Path(label).is_file() or is_selection(label) or not files:
            raise UserError(
                f'--group must be LABEL FILE [FILE ...], got {" ".join([label, *files])}'
            )
        if label in groups:
            raise UserError(f'--group must have unique labels, got {label!r} twice')
        runs = [run for file in files for run in tested(file).items()]
        for source, _ in runs:
            path = os.path.realpath(source)
            if path in paths:
                raise UserError(f'--group must have different files, got {source!r} twice')
            paths.add(path)
        groups[label] = [finite(*run, metric) for run in runs]
    return groups


def read_signs(arguments: Sequence[str]) -> dict[str, str]:
    signs = {}
    for argument in arguments:
        label, _, sign = argument.rpartition('=')
        if not label or sign not in ('+', '-'):
            raise UserError(f'--expect must be LABEL=+ or LABEL=-, got {argument!r}')
        signs[label] = sign
    return signs


def run(args: argparse.Namespace) -> None:
    with user_errors(ValueError, OSError):
        check_writable('--table', [args.table] if args.table else [])
        groups = read_groups(args.group, args.metric)
        label = args.label or args.metric.replace('_per_', '/')
        table = verdict_table(groups, label, read_signs(args.expect))
        if args.out:
            draw_seeds(groups, label, args.numbers).savefig(args.out, dpi=args.dpi)
        if args.table:
            Path(args.table).write_text(table, encoding='utf-8')
    print(table, end='')
