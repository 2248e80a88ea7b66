"""Training curves of sequence models."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# With more runs the legend would hide the curves.
LEGEND_INSIDE = 4


def read_scalars(path: str | Path) -> list[dict]:
    """The log of one run, a dict of scalars per record, as mmengine's LocalVisBackend writes it.

    Args:
        path: A file of JSON lines (``vis_data/scalars.json``), or a work dir, of which all logs
            are read: a resumed run has several, and an iteration that ran again counts as it ran
            last.

    Raises:
        FileNotFoundError: ``path`` does not exist, or is a folder without logs.
        ValueError: A line is not JSON.
    """
    path = Path(path)
    files = sorted(path.glob('*/vis_data/scalars.json')) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise FileNotFoundError(f'{str(path)!r} is neither a log of scalars (JSON lines) nor a '
                                'work dir that holds one.')
    records: list[dict] = []
    for file in files:
        try:
            later = [json.loads(line) for line in file.read_text().splitlines()]
        except json.JSONDecodeError as error:
            raise ValueError(f'{str(file)!r} is not a log of JSON lines: {error}') from error
        first = next((record['iter'] for record in later if 'iter' in record), math.inf)
        again = [i for i, record in enumerate(records) if record.get('iter', 0) >= first]
        records = records[:again[0]] if again else records
        records += later
    return records


def draw_curves(
    runs: Mapping[str, Sequence[dict]],
    metric: str | None = None,
    references: Mapping[str, float] | None = None,
) -> Figure:
    """Draw the loss (lines) and the validation (points) of runs in bits against the iteration.

    Args:
        runs: Label to the records of :func:`read_scalars`. ``loss`` is in nats per prediction.
        metric: Name of the validated metric in bits, such as ``'bits_per_dim'``; by default the
            first that begins with ``bits_per_``.
        references: Label to a number of bits, drawn as horizontal lines.

    Returns:
        A figure with an Agg canvas of its own, for ``figure.savefig(path)``.

    Raises:
        ValueError: There is no run, a run has neither a loss nor the metric, no run has the given
            metric, or a run was validated in another unit.
    """
    if not runs:
        raise ValueError('runs must hold at least one log, but it is empty.')
    units = {label: validated_units(records) for label, records in runs.items()}
    chosen = metric or next(
        (unit for names in units.values() for unit in names), 'bits_per_dim')
    if metric and not any(metric in record for records in runs.values() for record in records):
        found = ', '.join(dict.fromkeys(unit for names in units.values() for unit in names))
        raise ValueError(f'metric must be one that a run has ({found or "there is none"}), got '
                         f'{metric!r}.')
    for label, names in units.items():
        if names and chosen not in names:
            raise ValueError(f'runs on one axis must have the same unit, but {label!r} has '
                             f'{", ".join(names)} and no {chosen}.')
    metric = chosen
    figure = Figure(figsize=(7, 4.5), layout='constrained')
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for number, (label, records) in enumerate(runs.items()):
        colour = f'C{number}'
        losses = [(record['iter'], record['loss'] / math.log(2)) for record in records
                  if 'iter' in record and 'loss' in record]
        points = validations(records, metric)
        if not losses and not points:
            raise ValueError(f'the log {label!r} has neither a loss nor {metric}.')
        # A leading underscore keeps a line out of the legend, where its validation stands.
        axis.plot(*zip(*losses, strict=True), color=colour, alpha=0.5, linewidth=1,
                  label='_' * bool(points) + f'{label}, training')
        if points:
            last = f'{label}: {points[-1][1]:.3f} at the end'
            axis.plot(*zip(*points, strict=True), 'o-', color=colour, markersize=3, label=last)
    for label, value in (references or {}).items():
        axis.axhline(value, color='grey', linestyle='--', linewidth=1)
        axis.annotate(f'{label}: {value:g}', (1, value), xycoords=('axes fraction', 'data'),
                      ha='right', va='bottom', fontsize=8, color='dimgrey')
    axis.set_xlabel('iteration')
    axis.set_ylabel(metric.replace('_per_', '/'))
    axis.grid(alpha=0.3)
    axis.set_title('thin: training, dots: validation', fontsize=8)
    if len(runs) > LEGEND_INSIDE:
        figure.legend(fontsize=8, loc='outside right upper')
    else:
        axis.legend(fontsize=8)
    return figure


def validated_units(records: Sequence[dict]) -> list[str]:
    """The names of the metrics in bits, in the order of the log."""
    return list(dict.fromkeys(
        key for record in records for key in record if key.startswith('bits_per_')))


def validations(records: Sequence[dict], metric: str) -> list[tuple[int, float]]:
    """``(iteration, value)`` of every validation.

    mmengine numbers the validations of a run by epoch with epochs. An epoch of n iterations has
    logged at most n of them, so n is the largest quotient of iterations and epochs, rounded up.
    """
    training = [(r['iter'], r['epoch']) for r in records if 'iter' in r and 'epoch' in r]
    epoch_length = max((-(-iteration // epoch) for iteration, epoch in training), default=1)
    last_epoch = max((epoch for _, epoch in training), default=0)
    return [(r['step'] * epoch_length if r['step'] <= last_epoch else r['step'], r[metric])
            for r in records if metric in r]
