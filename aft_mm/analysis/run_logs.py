"""Read the logs of runs: metrics by iteration and training time; means over seeds."""

import itertools
import json
import math
import re
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from aft_mm.errors import UserError

CLOCKS = ('step', 'time', 'data_time')
MOST_DECIMALS = 8  # beyond this is rounding noise
# The scalars contain neither the iteration of a resume nor the epoch length.
_RESUMED = re.compile(r' - INFO - resumed epoch: \d+, iter: (\d+)')
_EPOCH_LENGTH = re.compile(r'Epoch\(train\)\s*\[\s*\d+\]\[\s*\d+/(\d+)\]')


def read_scalars(path: str | Path) -> list[dict]:
    """Read the log of a run, written by mmengine's LocalVisBackend, one dict per record.

    ``path`` is a file of JSON lines (``vis_data/scalars.json``), or a work dir, in which the last
    log of repeated iterations and validations counts, and a new run replaces earlier ones.
    """
    path = Path(path)
    files = sorted(path.glob('*/vis_data/scalars.json')) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(
            f'{str(path)!r} is neither a log of scalars (JSON lines) nor a work dir with one'
        )
    records: list[dict] = []
    for file in files:
        text = _text_log(file)
        later = _read(file, text)
        first = next((record['iter'] for record in later if 'iter' in record), math.inf)
        resumed = _resumed_at(text)
        begin = first - 1 if resumed is None else resumed
        again = (i for i, record in enumerate(records) if record.get('iter', 0) > begin)
        records = records[: next(again, len(records)) if begin else 0]
        # A resumed run validates its checkpoint once more.
        before = itertools.takewhile(lambda record: not is_training(record), later)
        repeated = {record.get('step') for record in before}
        records = [r for r in records if is_training(r) or r.get('step') not in repeated]
        records += later
    return records


def _read(file: Path, text: str) -> list[dict]:
    try:
        *lines, last = file.read_text(encoding='utf-8').split('\n')
        records = [json.loads(line) for line in lines]
        with suppress(
            *(ValueError,) if records else ()
        ):  # a run was killed as it wrote the last line
            records += [json.loads(last)] if last else []
    except ValueError as error:  # neither text nor JSON
        raise UserError(f'{str(file)!r} is not a log of JSON lines: {error}') from error
    if not all(isinstance(record, dict) for record in records):
        raise UserError(f'{str(file)!r} is not a log of JSON lines: a line is not a dict')
    length = _EPOCH_LENGTH.search(text)
    if length:
        for record in records:
            if 'epoch' in record:
                record['epoch_length'] = int(length[1])
    return records


def _text_log(file: Path) -> str:
    """Return the text that a run logged with its scalars."""
    logs = sorted(file.parent.parent.glob('*.log')) if file.name == 'scalars.json' else ()
    return '\n'.join(log.read_text(encoding='utf-8', errors='replace') for log in logs)


def _resumed_at(text: str) -> int | None:
    """Return the iteration that a run resumed from, 0 for a new one, None if no log says it."""
    found = _RESUMED.search(text)
    if found:
        return int(found[1])
    return 0 if '(train)' in text else None


def is_training(record: dict) -> bool:
    return 'iter' in record


def validated_metrics(records: Sequence[dict]) -> list[str]:
    names = (
        name
        for record in records
        if not is_training(record)
        for name, value in record.items()
        if name not in CLOCKS and isinstance(value, int | float)
    )
    return list(dict.fromkeys(names))


def epoch_length(records: Sequence[dict]) -> int | None:
    """Return the number of iterations per epoch, None for a run that does not count epochs.

    A single epoch ends with the last logged iteration.
    """
    first: dict[int, int] = {}
    for record in records:
        if is_training(record) and 'epoch' in record:
            if 'epoch_length' in record:
                return record['epoch_length']
            first.setdefault(record['epoch'], record['iter'])
    if len(first) > 1:
        begin, end = min(first), max(first)
        return round((first[end] - first[begin]) / (end - begin))
    return max((r['iter'] for r in records if is_training(r)), default=None) if first else None


def trained(records: Sequence[dict], metric: str) -> list[tuple[int, float]]:
    return [(r['iter'], r[metric]) for r in records if is_training(r) and metric in r]


def validations(records: Sequence[dict], metric: str) -> list[tuple[int, float]]:
    values = [(r['step'], r[metric]) for r in records if not is_training(r) and metric in r]
    last_epoch = max((r.get('epoch', 0) for r in records if is_training(r)), default=0)
    length = epoch_length(records)
    if length is None or any(step > last_epoch for step, _ in values):
        return values
    return [(step * length, value) for step, value in values]


def seconds_at(records: Sequence[dict], iterations: Sequence[int]) -> np.ndarray:
    """Return the seconds of training up to each iteration, without validation."""
    times = np.array(trained(records, 'time'), dtype=float).reshape(-1, 2)
    if not len(times):
        raise UserError('the log must have the iteration time of IterTimerHook, got none')
    iteration, mean = times.T
    clock = np.cumsum(np.diff(iteration, prepend=0) * mean)
    wanted = np.asarray(iterations, dtype=float)
    # Iterations after the last record are assumed to take as long.
    beyond = np.maximum(wanted - iteration[-1], 0) * mean[-1]
    return np.interp(wanted, [0, *iteration], [0, *clock]) + beyond


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def decimals_of(errors: Sequence[float | None], means: Sequence[float]) -> int:
    """Return the decimals for two digits of the smallest error, or four of the smallest mean."""
    known = [error for error in errors if error]
    sizes = known or [abs(mean) for mean in means if mean] or [1.0]
    digits = 2 if known else 4
    return min(MOST_DECIMALS, max(0, digits - 1 - math.floor(math.log10(min(sizes)))))
