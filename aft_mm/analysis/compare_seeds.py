import argparse
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from aft_mm.config.texts import read_table
from aft_mm.errors import UserError, user_errors

from .run_files import is_selection, selected
from .verdicts import verdict_table


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
        groups = read_groups(args.group, args.metric)
        table = verdict_table(groups, args.metric.replace('_per_', '/'), read_signs(args.expect))
    print(table, end='')
