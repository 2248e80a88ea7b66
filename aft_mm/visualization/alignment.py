"""What a recogniser heard when."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Of units that are never more likely than this no row is drawn.
FAINT = 0.05


def draw_alignment(
    log_probs: np.ndarray,
    names: Sequence[str],
    seconds_per_frame: float,
    transcript: str | None = None,
) -> Figure:
    """Draw the posteriors of CTC over time, and the units of the most likely alignment.

    Rows are the units that are likely at some time, in the order in which they first are, below
    them the blank. Each unit of the alignment is written above the frame where it is most likely.

    Args:
        log_probs: [T, V], the blank first.
        names: Of the V units.
        seconds_per_frame: Of the T frames.
        transcript: What was said, for the title.

    Returns:
        A figure with an Agg canvas of its own, for ``figure.savefig(path)``.

    Raises:
        ValueError: ``log_probs`` is not [T, V] with the V of ``names``.
    """
    if np.ndim(log_probs) != 2 or not len(log_probs) or log_probs.shape[1] != len(names):
        raise ValueError(
            f'log_probs must be [T, {len(names)}] for as many names, got '
            f'{list(np.shape(log_probs))}.'
        )
    probs = np.exp(log_probs)
    path, start, peaks = probs.argmax(1), 0, []
    for unit, run in groupby(path):
        length = len(list(run))
        if unit:
            peaks.append((start + int(probs[start : start + length, unit].argmax()), int(unit)))
        start += length
    likely = [unit for unit in range(1, len(names)) if probs[:, unit].max() > FAINT]
    likely.sort(key=lambda unit: int((probs[:, unit] > FAINT).argmax()))
    rows = [*likely, 0]
    duration = len(probs) * seconds_per_frame
    figure = Figure(
        figsize=(min(16.0, 3.0 + 3.0 * duration), 1.7 + 0.2 * len(rows)), layout='constrained'
    )
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    picture = axis.imshow(
        probs.T[rows],
        aspect='auto',
        cmap='Blues',
        vmin=0,
        vmax=1,
        interpolation='nearest',
        extent=(0, duration, len(rows) - 0.5, -0.5),
    )
    axis.set_yticks(range(len(rows)), [names[unit].replace(' ', '␣') for unit in rows], fontsize=8)
    axis.set_xlabel('seconds')
    for number, (frame, unit) in enumerate(peaks):
        # By turns higher and lower, as units may follow each other within a frame's width.
        axis.text(
            (frame + 0.5) * seconds_per_frame,
            -0.7 - 0.9 * (number % 2),
            names[unit].replace(' ', '␣'),
            ha='center',
            va='bottom',
            fontsize=8,
            color='C3',
        )
        axis.axvline((frame + 0.5) * seconds_per_frame, color='C3', linewidth=0.4, alpha=0.5)
    if transcript is not None:
        axis.set_title(transcript, fontsize=9, pad=34)
    figure.colorbar(picture, ax=axis, label='probability', fraction=0.03, pad=0.01)
    return figure
