"""What the log of a run holds: its metrics by iteration, and how long it trained."""

import json
import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aft_mm.errors import UserError

#: Of a record of a validation, what is no metric.
_CLOCKS = ('step', 'time', 'data_time')
# mmengine's line of an iteration; the scalars do not tell how long an epoch is.
MOST_DECIMALS = 8
_EPOCH_LENGTH = re.compile(r'Epoch\(train\)\s*\[\s*\d+\]\[\s*\d+/(\d+)\]')


def read_scalars(path: str | Path) -> list[dict]:
    """The log of one run, a dict of scalars per record, as mmengine's LocalVisBackend writes it.

    Args:
        path: A file of JSON lines (``vis_data/scalars.json``), or a work dir, of which all logs
            are read: a resumed run has several, and an iteration that ran again counts as it ran
            last. Where the text log stands beside, its length of an epoch becomes the entry
            ``epoch_length`` of the training records.

    Raises:
        FileNotFoundError: ``path`` does not exist, or is a folder without logs.
        ValueError: A line is not a dict in JSON.
    """
    path = Path(path)
    files = sorted(path.glob('*/vis_data/scalars.json')) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(
            f'{str(path)!r} is neither a log of scalars (JSON lines) nor a work dir that holds one.'
        )
    records: list[dict] = []
    for file in files:
        later = _read(file)
        first = next((record['iter'] for record in later if 'iter' in record), math.inf)
        again = [i for i, record in enumerate(records) if record.get('iter', 0) >= first]
        records = records[: again[0]] if again else records
        records += later
    return records


def _read(file: Path) -> list[dict]:
    try:
        records = [json.loads(line) for line in file.read_text(encoding='utf-8').splitlines()]
    except ValueError as error:  # neither text nor JSON
        raise UserError(f'{str(file)!r} is not a log of JSON lines: {error}') from error
    if not all(isinstance(record, dict) for record in records):
        raise UserError(f'{str(file)!r} is not a log of JSON lines: a line holds no dict.')
    for text_log in file.parent.parent.glob('*.log') if file.name == 'scalars.json' else ():
        length = _EPOCH_LENGTH.search(text_log.read_text(encoding='utf-8', errors='replace'))
        if length:
            for record in records:
                if 'epoch' in record:
                    record['epoch_length'] = int(length.group(1))
    return records


def is_training(record: dict) -> bool:
    """Whether a record is of training iterations; the others are of validations."""
    return 'iter' in record


def validated_metrics(records: Sequence[dict]) -> list[str]:
    """The names of the numbers that validations gave, in the order of the log."""
    return list(
        dict.fromkeys(
            name
            for record in records
            if not is_training(record)
            for name, value in record.items()
            if name not in _CLOCKS and isinstance(value, int | float)
        )
    )


def epoch_length(records: Sequence[dict]) -> int | None:
    """Iterations of an epoch, None for a run that does not count epochs.

    mmengine logs every k-th iteration of each epoch, so that the first records of two epochs lie
    whole epochs apart, whatever k is. Of a single epoch without ``epoch_length`` only the last
    logged iteration is known, and taken for its end.
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
    """``(iteration, value)`` of every training record that has a metric, such as the loss."""
    return [(r['iter'], r[metric]) for r in records if is_training(r) and metric in r]


def validations(records: Sequence[dict], metric: str) -> list[tuple[int, float]]:
    """``(iteration, value)`` of every validation that has a metric.

    mmengine numbers the validations of a run by epoch with epochs, else with iterations.
    """
    found = [(r['step'], r[metric]) for r in records if not is_training(r) and metric in r]
    last_epoch = max((r.get('epoch', 0) for r in records if is_training(r)), default=0)
    length = epoch_length(records)
    if length is None or any(step > last_epoch for step, _ in found):
        return found
    return [(step * length, value) for step, value in found]


def seconds_at(records: Sequence[dict], iterations: Sequence[int]) -> np.ndarray:
    """Seconds of training until each iteration, of validations and checkpoints none.

    They are summed from the mean ``time`` of an iteration that each record has, over the
    iterations since the record before.

    Raises:
        ValueError: No record has a time.
    """
    times = np.array(trained(records, 'time'), dtype=float).reshape(-1, 2)
    if not len(times):
        raise UserError('the log has no time of an iteration, which IterTimerHook gives.')
    iteration, mean = times.T
    clock = np.cumsum(np.diff(iteration, prepend=0) * mean)
    wanted = np.asarray(iterations, dtype=float)
    # After the last record an iteration takes what it took there.
    beyond = np.maximum(wanted - iteration[-1], 0) * mean[-1]
    return np.interp(wanted, [0, *iteration], [0, *clock]) + beyond


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error of the mean, s / √n with the sample deviation s; None for n = 1."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return statistics.mean(values), error


def difference_and_error(
    values: Sequence[float],
    reference: Sequence[float],
) -> tuple[float, float | None]:
    """Difference of two means and its standard error after Welch, √(se₁² + se₂²).

    The error is None where one of the means has none.
    """
    (mean, error), (other, other_error) = mean_and_error(values), mean_and_error(reference)
    known = error is not None and other_error is not None
    return mean - other, math.hypot(error, other_error) if known else None


def decimals_of(errors: Sequence[float | None], means: Sequence[float]) -> int:
    """Digits after the point: two of the smallest error, or four of the smallest mean."""
    known = [error for error in errors if error]
    sizes = known or [abs(mean) for mean in means if mean] or [1.0]
    digits = 2 if known else 4
    return min(MOST_DECIMALS, max(0, digits - 1 - math.floor(math.log10(min(sizes)))))
