"""Checks, footers and output files of the tools that plot figures."""

import argparse
import csv
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from aft_mm.checks import check_int
from aft_mm.config.finding import check_checkpoint

from .arguments import MAX_DPI, PICTURES, check_output


def check_picture(args: argparse.Namespace) -> None:
    check_output('--out', args.out, PICTURES)
    check_int('--dpi', args.dpi, 1, MAX_DPI)
    if getattr(args, 'csv', None):
        check_output('--csv', args.csv, ('.csv',))
    check_checkpoint(getattr(args, 'checkpoint', None))


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
