import argparse
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view

from aft_mm.checks import check_int
from aft_mm.errors import UserError, user_errors
from aft_mm.visualization.figures import new_figure, plain

from .run_files import read_runs
from .run_logs import (
    epoch_length,
    mean_and_error,
    seconds_at,
    trained,
    validated_metrics,
    validations,
)

LEGEND_INSIDE = 4  # more would hide the curves
COLOURS = 10
LINES = ('-', '--', ':')  # of each ten runs
BITS = 'bits_per_'
# Units of the metrics of mmengine, mmpretrain and mmseg; the names of ours contain them.
UNITS = {
    **dict.fromkeys(('accuracy/top1', 'accuracy/top5', 'aAcc', 'mAcc', 'mIoU', 'mDice'), '%'),
    'time': 's/iteration',
    'data_time': 's/iteration',
    'memory': 'MB',
}

Records = Sequence[dict]
Points = Sequence[tuple[int, float]]


def metric_label(metric: str) -> str:
    for ending, unit in (('_percent', '%'), ('_db', 'dB')):
        if metric.endswith(ending):
            return f'{metric.removesuffix(ending)} [{unit}]'
    unit = f' [{UNITS[metric]}]' if metric in UNITS else ''
    return metric.replace('_per_', '/') + unit


def draw_curves(
    runs: Mapping[str, Records | Sequence[Records]],
    metric: str | Sequence[str] | None = None,
    over: str = 'iteration',
    smooth: int = 1,
    top: float | None = None,
) -> Figure:
    """Plot metrics of runs, each on its own axes: thin lines for training, dots for validation.

    With a validation metric in bits, the training loss (nats per prediction) is plotted in bits,
    too. Several seeds are plotted as their mean with a band of one standard error.

    Args:
        runs: Label to the records of :func:`read_scalars`, or to a list of records for several
            seeds.
        metric: By default the first in bits, or else the loss and the first validation metric.
        over: 'iteration', 'epoch' or 'time'.
        smooth: Plot the mean of this many logged training values.
        top: Upper end of the first axis.
    """
    check_int('smooth', smooth, 1)
    groups = {label: _seeds(label, records) for label, records in runs.items()}
    metrics = [metric] if isinstance(metric, str) else list(metric or _default_metrics(groups))
    _check_metrics(groups, metrics)
    below = len(groups) if len(groups) > LEGEND_INSIDE else 0
    figure = new_figure(7, 0.9 + 3.6 * len(metrics) + 0.18 * below)
    axes = figure.subplots(len(metrics), sharex=True, squeeze=False)[:, 0]
    unit, divisor = _unit(groups, over)
    for axis, name in zip(axes, metrics, strict=True):
        for number, (label, seeds) in enumerate(groups.items()):
            line = dict(color=f'C{number}', linestyle=LINES[number // COLOURS % len(LINES)])
            _draw_group(axis, line, label, seeds, name, over, divisor, smooth)
        axis.set_ylabel(plain(metric_label(name)))
        axis.grid(alpha=0.3)
        if not below:
            axis.legend(fontsize=8)
    if top is not None:
        least = min(np.min(line.get_ydata()) for line in axes[0].get_lines())
        if top <= least:
            raise UserError(f'top must be above the lowest value, {least:.4g}, got {top}')
        axes[0].set_ylim(least - 0.05 * (top - least), top)
    axes[-1].set_xlabel(unit)
    several = any(len(seeds) > 1 for seeds in groups.values())
    axes[0].set_title(
        'thin: training, dots: validation' + several * ', band: ± standard error', fontsize=8
    )
    if below:
        handles = axes[-1].get_legend_handles_labels()
        figure.legend(*handles, fontsize=8, loc='outside lower center')
    return figure


def _seeds(label: str, records: Records | Sequence[Records]) -> list[Records]:
    if not records:
        raise UserError(f'the log {label!r} is empty')
    if isinstance(records[0], dict):
        return [cast(Records, records)]
    return list(cast(Sequence[Records], records))


def _default_metrics(groups: Mapping[str, Sequence[Records]]) -> list[str]:
    everything = [records for seeds in groups.values() for records in seeds]
    names = list(dict.fromkeys(name for one in everything for name in validated_metrics(one)))
    bits = [name for name in names if name.startswith(BITS)]
    if bits:
        return bits[:1]
    has_loss = any(trained(records, 'loss') for records in everything)
    return ['loss'] * (has_loss or not names) + names[:1]


def _check_metrics(groups: Mapping[str, Sequence[Records]], metrics: Sequence[str]) -> None:
    everything = [records for seeds in groups.values() for records in seeds]
    for metric in metrics:
        if metric != 'loss' and not any(
            _lines(records, metric)[1] or trained(records, metric) for records in everything
        ):
            known = ', '.join(dict.fromkeys(name for one in everything for name in _names(one)))
            raise UserError(
                f'metric must be one of the logs ({known or "which have none"}), got {metric!r}'
            )
        for label, seeds in groups.items():
            for records in seeds:
                units = [n for n in validated_metrics(records) if n.startswith(BITS)]
                if metric.startswith(BITS) and units and metric not in units:
                    raise UserError(
                        'runs on the same axes must have the same unit, but '
                        f'{label!r} has {", ".join(units)} and no {metric}'
                    )
                if not any(_lines(records, metric)):
                    raise UserError(
                        f'the log {label!r} has no {metric}; it has '
                        f'{", ".join(_names(records)) or "no metric"}'
                    )


def _names(records: Records) -> list[str]:
    training = (
        name
        for record in records
        if 'iter' in record
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ('iter', 'step', 'epoch', 'epoch_length')
    )
    return list(dict.fromkeys([*validated_metrics(records), *training]))


def _lines(records: Records, metric: str) -> tuple[Points, Points]:
    if metric.startswith(BITS):
        loss = trained(records, 'loss')
        return [(step, value / math.log(2)) for step, value in loss], validations(records, metric)
    return trained(records, metric), validations(records, metric)


def _unit(groups: Mapping[str, Sequence[Records]], over: str) -> tuple[str, float]:
    if over != 'time':
        return over, 1
    longest = 0.0
    for label, seeds in groups.items():
        for records in seeds:
            end = max((r['iter'] for r in records if 'iter' in r), default=0)
            longest = max(longest, float(_places(label, records, over)([end])[0]))
    unit, seconds = next(
        (pair for pair in (('h', 3600), ('min', 60)) if longest >= 2 * pair[1]), ('s', 1)
    )
    return f'training time [{unit}], without validation', seconds


def _places(label: str, records: Records, over: str) -> Callable[[Sequence[int]], np.ndarray]:
    if over == 'time':

        def clock(steps: Sequence[int]) -> np.ndarray:
            try:
                return seconds_at(records, steps)
            except ValueError as error:
                raise UserError(f'{label!r} cannot be plotted over time: {error}') from None

        return clock
    length = epoch_length(records) if over == 'epoch' else 1
    if length is None:
        raise UserError(f'{label!r} cannot be plotted over epochs: its log does not have them')
    return lambda steps: np.asarray(steps, dtype=float) / length


def _draw_group(
    axis: Axes,
    line: dict[str, Any],
    label: str,
    seeds: Sequence[Records],
    metric: str,
    over: str,
    divisor: float,
    smooth: int,
) -> None:
    lines = [_lines(records, metric) for records in seeds]
    clocks = [_places(label, records, over) for records in seeds]
    validated = any(points for _, points in lines)
    for part, kind in enumerate(('training', 'validation')):
        runs = [dict(points[part]) for points in lines]
        if not any(runs):
            continue
        steps = sorted(set.intersection(*map(set, runs)))
        if not steps:
            raise UserError(
                f'the runs of {label!r} have no iteration in common at which they all '
                f'have {metric} in {kind}'
            )
        values = np.array([[run[step] for step in steps] for run in runs])
        if not part:
            if smooth > len(steps):
                raise UserError(
                    f'smooth must be at most {len(steps)}, the training values of {label!r}, got '
                    f'{smooth}'
                )
            values = sliding_window_view(values, smooth, axis=1).mean(-1)
            steps = steps[smooth - 1 :]
        x = np.mean([clock(steps) for clock in clocks], axis=0) / divisor
        mean, error = zip(*map(mean_and_error, values.T.tolist()), strict=True)
        if part:
            last = f'{mean[-1]:.3f}' + ('' if error[-1] is None else f' ± {error[-1]:.3f}')
            entry = plain(f'{label}: {last} at the end') + (
                f', {len(runs)} runs' if len(runs) > 1 else ''
            )
            axis.plot(x, mean, marker='o', markersize=3, label=entry, **line)
        else:
            # A leading underscore hides a line from the legend if its validation has an entry.
            entry = '_' * validated + plain(f'{label}, training')
            alpha = 0.5 if validated else 1
            axis.plot(x, mean, alpha=alpha, linewidth=1, label=entry, **line)
        if len(runs) > 1:
            low, high = np.subtract(mean, error), np.add(mean, error)
            axis.fill_between(x, low, high, color=line['color'], alpha=0.2, linewidth=0)


def pair(text: str) -> tuple[str, str]:
    """Split ``[LABEL=]VALUE``; both may contain equals signs."""
    if Path(text).exists():
        return text, text
    label, _, value = text.rpartition('=')
    return label or value, value


def runs_of(args: argparse.Namespace) -> dict[str, list[str]]:
    pairs = [(label, [path]) for label, path in map(pair, args.logs)]
    for label, *paths in args.group:
        if not paths or len(set(paths)) < len(paths):
            raise UserError(
                '--group must be LABEL LOG [LOG ...] with different logs, got '
                f'{" ".join([label, *paths])}'
            )
        pairs.append((label, paths))
    if not pairs:
        raise UserError('[LABEL=]LOG or --group must give at least one log, got none')
    for label, number in Counter(label for label, _ in pairs).items():
        if number > 1:
            raise UserError(f'[LABEL=]LOG must have unique labels, got {label!r} twice')
    return dict(pairs)


def run(args: argparse.Namespace) -> None:
    with user_errors(ValueError, OSError):
        groups = {label: read_runs(logs) for label, logs in runs_of(args).items()}
        logs = {label: [log for _, log in runs] for label, runs in groups.items()}
        figure = draw_curves(logs, args.metric, args.over, args.smooth, args.top)
        figure.savefig(args.out, dpi=args.dpi)
    count = sum(map(len, groups.values()))
    print(f'plotted {count} run{"s" if count > 1 else ""} to {args.out}')
