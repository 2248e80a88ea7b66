"""Training curves of groups of runs that differ by their seed."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = 10  # of matplotlib's cycle; the groups behind them are dashed


def mean_curve(
    runs: Sequence[Sequence[dict]], scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Iterations, mean loss and its standard error over runs, where all of them have logged one.

    The error of a single run is 0.

    Args:
        runs: The records of :func:`read_scalars`, one list per run.
        scale: What the loss is multiplied by, such as 1 / ln 2 for bits.

    Raises:
        ValueError: There is no iteration with a loss in all runs.
    """
    losses = [{r['iter']: r['loss'] for r in records if 'iter' in r and 'loss' in r}
              for records in runs]
    common = sorted(set.intersection(*map(set, losses))) if losses else []
    if not common:
        raise ValueError('runs of a group must have logged a loss at the same iterations.')
    values = scale * np.array([[loss[i] for i in common] for loss in losses])
    error = values.std(0, ddof=1) / len(losses) ** 0.5 if len(losses) > 1 else 0 * values[0]
    return np.array(common), values.mean(0), error


def draw_seed_curves(
    groups: Mapping[str, Sequence[Sequence[dict]]],
    label: str,
    scale: float = 1.0,
    milliseconds: Mapping[str, float] | None = None,
) -> Figure:
    """Draw the mean training loss of each group with a band of one standard error to both sides.

    Args:
        groups: Name to the records of its runs, one list per seed; a single run has no band.
        label: What the loss is, with its unit.
        scale: What the loss is multiplied by.
        milliseconds: Name to the time of an iteration; with it a second panel shows the same curves
            against the time of the training.

    Returns:
        A figure with an Agg canvas of its own, for ``figure.savefig(path)``.

    Raises:
        ValueError: There is no group, the runs of one have no common iteration, or one has no time.
    """
    if not groups:
        raise ValueError('groups must hold at least one group of runs, but it is empty.')
    without = [name for name in groups if milliseconds is not None and name not in milliseconds]
    if without:
        raise ValueError(f'milliseconds must hold every group, but {without[0]!r} is missing.')
    panels = 1 if milliseconds is None else 2
    figure = Figure(figsize=(2.2 + 4.6 * panels, 4.5), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels, squeeze=False, sharey=True)[0]
    for number, (name, runs) in enumerate(groups.items()):
        iterations, mean, error = mean_curve(runs, scale)
        style = dict(color=f'C{number % COLOURS}', linestyle='--' if number >= COLOURS else '-')
        _draw(axes[0], iterations, mean, error, style, f'{name} ({len(runs)})')
        if milliseconds is not None:
            _draw(axes[1], iterations * milliseconds[name] / 1e3, mean, error, style, '_' + name)
    for axis, title in zip(axes, ('iteration', 'time of training, s'), strict=False):
        axis.set_xlabel(title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(label)
    figure.legend(fontsize=8, loc='outside right upper', title='(runs)', title_fontsize=8)
    return figure


def _draw(axis: Axes, x: np.ndarray, mean: np.ndarray, error: np.ndarray, style: Mapping,
          name: str) -> None:
    axis.plot(x, mean, linewidth=1.2, label=name, **style)
    if error.any():
        axis.fill_between(x, mean - error, mean + error, color=style['color'], alpha=0.2,
                          linewidth=0)
