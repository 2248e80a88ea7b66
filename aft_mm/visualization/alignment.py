from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .figures import plain

FAINT = 0.05  # units that never exceed this probability get no row


def draw_alignment(
    log_probs: np.ndarray,
    names: Sequence[str],
    seconds_per_frame: float,
    transcript: str | None = None,
) -> Figure:
    """Draw CTC posteriors over time with the most likely alignment.

    Args:
        log_probs: Log-probabilities [T, V], the blank first.
        names: The V units.

    Returns:
        A figure, see :func:`.figures.new_figure`.
    """
    if np.ndim(log_probs) != 2 or not len(log_probs) or log_probs.shape[1] != len(names):
        raise ValueError(
            f'log_probs must be [T, {len(names)}] for as many names, got '
            f'{list(np.shape(log_probs))}'
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
    style: dict[str, Any] = dict(
        aspect='auto', cmap='Blues', vmin=0, vmax=1, interpolation='nearest'
    )
    picture = axis.imshow(probs.T[rows], extent=(0, duration, len(rows) - 0.5, -0.5), **style)
    axis.set_yticks(
        range(len(rows)), [plain(names[unit].replace(' ', '␣')) for unit in rows], fontsize=8
    )
    axis.set_xlabel('seconds')
    for number, (frame, unit) in enumerate(peaks):
        time, name = (frame + 0.5) * seconds_per_frame, names[unit].replace(' ', '␣')
        # Two heights in turn, since neighbouring labels may overlap.
        height = -0.7 - 0.9 * (number % 2)
        axis.text(time, height, plain(name), ha='center', va='bottom', fontsize=8, color='C3')
        axis.axvline(time, color='C3', linewidth=0.4, alpha=0.5)
    if transcript is not None:
        axis.set_title(plain(transcript), fontsize=9, pad=34)
    figure.colorbar(picture, ax=axis, label='probability', fraction=0.03, pad=0.01)
    return figure
