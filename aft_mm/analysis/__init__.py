"""Plots of models and runs, comparisons, complexity, samples of data sets; and what these share."""

import csv
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def footer(config: str, checkpoint: str | os.PathLike | None = None) -> str:
    """Return the source of a figure: ``config.py · epoch_12.pth · sha256 0123456789ab``."""
    parts = [Path(config).name]
    if checkpoint is None:
        return f'{parts[0]} · random weights'
    parts.append(Path(checkpoint).name)
    if os.path.isfile(checkpoint):
        parts.append(f'sha256 {hashlib.sha256(Path(checkpoint).read_bytes()).hexdigest()[:12]}')
    return ' · '.join(parts)


def write_csv(path: str, rows: Sequence[Mapping[str, object]]) -> None:
    with open(path, 'w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        for row in rows:
            cells = {k: f'{v:.6g}' if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(cells)


class AtMost(int):
    """A default number of samples; a smaller dataset gives all."""
