"""Plot the mean loss or metric of groups of runs that differ by their seed, over steps and time.

    python tools/analysis_tools/plot_seed_curves.py --out curves.png --bits --label bits/char \\
        --group AFT-local 'runs.jsonl:local*' --group transformer 'runs.jsonl:transformer*' \\
        --times iterations.json --top 4.2 --smooth 5

The training loss by default; `--metric accuracy/top1` plots that of each validation. LOG is a work
dir, its vis_data/scalars.json, or `FILE.jsonl:PATTERN`.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from aft_mm.analysis.plot_curves import by_label
from aft_mm.analysis.run_files import read_runs, time_of
from aft_mm.analysis.run_logs import read_times, trained, validations
from aft_mm.checks import check_int
from aft_mm.cli.arguments import add_picture_arguments, check_picture, tool_parser
from aft_mm.errors import UserError, user_errors
from aft_mm.visualization.figures import new_figure, plain

COLOURS = 10
LINES = ('-', '--', '-.')  # 30 styles with the colours; neighbours differ in both


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument(
        '--group',
        nargs='+',
        action='append',
        required=True,
        metavar=('LABEL', 'LOG'),
        help='runs that differ by their seed, logs or FILE.jsonl:PATTERN',
    )
    parser.add_argument('--label', required=True, help='name of the loss or metric with its unit')
    parser.add_argument(
        '--metric',
        default='loss',
        metavar='NAME',
        help='name in the logs, such as accuracy/top1; default %(default)s',
    )
    parser.add_argument('--bits', action='store_true', help='convert the loss from nats to bits')
    parser.add_argument(
        '--times',
        type=Path,
        metavar='JSON',
        help='output of tools/benchmarks/benchmark_iterations.py; adds a panel over time; other '
        'logs than FILE.jsonl:PATTERN must be named CONFIG_seedN.jsonl',
    )
    parser.add_argument(
        '--top',
        type=float,
        metavar='LOSS',
        help='upper end of the loss axis; first losses are high',
    )
    parser.add_argument(
        '--smooth',
        type=int,
        default=1,
        metavar='N',
        help='average each loss with the previous N - 1; default %(default)s',
    )
    add_picture_arguments(parser)
    return parser.parse_args(argv)


def mean_curve(
    runs: Sequence[Sequence[dict]], scale: float = 1.0, smooth: int = 1, metric: str = 'loss'
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return common iterations, mean loss times ``scale``, and its standard error."""
    check_int('smooth', smooth, 1)
    losses = [dict(trained(run, metric) or validations(run, metric)) for run in runs]
    common = sorted(set.intersection(*map(set, losses)))
    if not common:
        raise UserError(f'runs of a group must have logged {metric} at the same iterations')
    if smooth > len(common):
        raise UserError(
            f'smooth must be at most {len(common)}, the values that all runs of a '
            f'group have logged, got {smooth}'
        )
    values = scale * np.array([[loss[i] for i in common] for loss in losses])
    values = np.lib.stride_tricks.sliding_window_view(values, smooth, axis=1).mean(-1)
    error = values.std(0, ddof=1) / len(losses) ** 0.5 if len(losses) > 1 else 0 * values[0]
    return np.array(common[smooth - 1 :]), values.mean(0), error


def draw_seed_curves(
    groups: Mapping[str, Sequence[Sequence[dict]]],
    label: str,
    scale: float = 1.0,
    milliseconds: Mapping[str, float] | None = None,
    top: float | None = None,
    smooth: int = 1,
    metric: str = 'loss',
) -> Figure:
    """Plot the mean loss or metric of each group with a band of ± one standard error.

    ``scale`` is a factor of the loss, ``top`` the end of its axis; ``milliseconds`` per iteration
    add a panel over time.
    """
    curves = {name: mean_curve(runs, scale, smooth, metric) for name, runs in groups.items()}
    lowest = {name: mean.min() for name, (_, mean, _) in curves.items()}
    above = [name for name in groups if top is not None and not lowest[name] < top]
    if above:
        raise UserError(
            f'top must be above the lowest loss of each group ({lowest[above[0]]:.4g} for '
            f'{above[0]!r}), got {top}'
        )
    panels = 1 if milliseconds is None else 2
    figure = new_figure(2.2 + 4.6 * panels, 5)
    axes = figure.subplots(1, panels, squeeze=False, sharey=True)[0]
    for number, (name, (iterations, mean, error)) in enumerate(curves.items()):
        style = dict(color=f'C{number % COLOURS}', linestyle=LINES[number % len(LINES)])
        _draw(axes[0], iterations, mean, error, style, f'{name} ({len(groups[name])})')
        if milliseconds is not None:
            _draw(axes[1], iterations * milliseconds[name] / 1e3, mean, error, style, '_' + name)
    for axis, title in zip(axes, ('iteration', 'training time [s]'), strict=False):
        axis.set_xlabel(title)
        axis.grid(alpha=0.3)
    if milliseconds is not None:
        axes[1].set_xscale('log')
        axes[1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[1].xaxis.set_major_formatter(ScalarFormatter())
        axes[1].xaxis.set_minor_formatter(NullFormatter())
    axes[0].set_ylabel(label)
    if top is not None:
        least = min(lowest.values())
        axes[0].set_ylim(least - 0.05 * (top - least), top)
    figure.legend(fontsize=8, loc='outside right upper', title='(runs)', title_fontsize=8)
    return figure


def _draw(
    axis: Axes, x: np.ndarray, mean: np.ndarray, error: np.ndarray, style: Mapping, name: str
) -> None:
    axis.plot(x, mean, linewidth=1.2, label=plain(name), **style)
    if error.any():
        axis.fill_between(
            x, mean - error, mean + error, color=style['color'], alpha=0.2, linewidth=0
        )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)

    with user_errors(ValueError, OSError):
        check_picture(args)
        for label, *files in args.group:
            if not files:
                raise UserError(f'--group must be LABEL LOG [LOG ...], got {label}')
        logs = by_label('--group', [(label, files) for label, *files in args.group])
        if args.bits and args.metric != 'loss':
            raise UserError(f'--bits converts the loss only, got --metric {args.metric}')
        groups = {label: read_runs(files) for label, files in logs.items()}
        times = args.times and read_times(args.times)
        scale = 1 / math.log(2) if args.bits else 1.0
        milliseconds = times and {label: time_of(runs, times) for label, runs in groups.items()}
        options = scale, milliseconds, args.top, args.smooth, args.metric
        records = {label: [run.records for run in runs] for label, runs in groups.items()}
        figure = draw_seed_curves(records, args.label, *options)
        figure.savefig(args.out, dpi=args.dpi)


if __name__ == '__main__':
    main()
