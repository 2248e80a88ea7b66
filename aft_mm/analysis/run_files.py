"""Files of runs: a line of JSON per run of a comparison, with its metrics and a thinned curve.

Curves are `train` by iteration and `val` by step (epochs in a run by epoch).
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from aft_mm.errors import UserError
from aft_mm.outputs import write_whole

from .run_logs import (
    CLOCKS,
    epoch_length,
    is_training,
    read_scalars,
    seconds_at,
    trained,
    validated_metrics,
)

RUNS = 'runs.jsonl'
POINTS = 100
_SELECTION = re.compile(r'(.+\.jsonl):(.+)')
# The ending of the name of a run: its seed, or the rate of a short run that chooses one.
_ENDING = re.compile(r'_(?:seed(\d+)|lr[\d.e-]+)(?=_|$)')
_UNUSED = (*CLOCKS, 'seconds_per_epoch')


def is_selection(argument: str) -> bool:
    return bool(_SELECTION.fullmatch(argument)) and not Path(argument).exists()


def read_lines(path: Path) -> dict[str, dict]:
    """Return the runs of a file by name; of repeated names the last line counts."""
    try:
        *lines, last = path.read_text(encoding='utf-8').split('\n')
    except OSError as error:
        raise UserError(f'{str(path)!r} cannot be read: {error.strerror}') from error
    except ValueError as error:
        raise UserError(f'{str(path)!r} is not a file of runs: {error}') from error
    runs = {}
    for text in filter(None, [*lines, last]):
        try:
            run = json.loads(text)
            runs[run['name']] = run
        except (ValueError, TypeError, KeyError) as error:
            if text is last and runs:  # a program was killed as it wrote the last line
                break
            raise UserError(
                f'{str(path)!r} is not a file of runs: {text[:40]!r} is no JSON with a name'
            ) from error
    return runs


def selected(argument: str) -> dict[str, dict]:
    match = _SELECTION.fullmatch(argument)
    assert match is not None  # is_selection
    file, pattern = match.groups()
    runs = read_lines(Path(file))
    chosen = {f'{file}:{name}': run for name, run in runs.items() if fnmatchcase(name, pattern)}
    if not chosen:
        raise UserError(
            f'{argument!r} has no run; the file has {", ".join(list(runs)[:3]) or "none at all"}'
            + ', ...' * (len(runs) > 3)
        )
    return chosen


def read_runs(arguments: Iterable[str]) -> list[tuple[str, list[dict]]]:
    """Return the name in messages and the records of the log of each run that arguments name."""
    runs = []
    for argument in arguments:
        if is_selection(argument):
            runs += [(source, records_of(run)) for source, run in selected(argument).items()]
        else:
            runs.append((argument, read_scalars(argument)))
    return runs


def config_name(name: str) -> str:
    return _ENDING.split(name)[0]


def seed_of(name: str) -> int | None:
    match = _ENDING.search(name)
    return int(match[1]) if match and match[1] else None


def records_of(run: Mapping[str, Any]) -> list[dict]:
    """Return the curves of a run as the records of its log; an iteration has the mean time."""
    records: list[dict] = []
    length = run.get('epoch_length')
    seconds = run['seconds'] / run['iterations'] if 'seconds' in run else None
    for record in _rows(run.get('train', {})):
        record['step'] = record['iter']
        if length:
            record |= {'epoch': math.ceil(record['iter'] / length), 'epoch_length': length}
        if seconds is not None:
            record['time'] = seconds
        records.append(record)
    return records + list(_rows(run.get('val', {})))


def _rows(columns: Mapping[str, Sequence]) -> Iterable[dict]:
    for values in zip(*columns.values(), strict=True):
        yield {name: x for name, x in zip(columns, values, strict=True) if x is not None}


def curves(records: Sequence[dict], points: int, metrics: Sequence[str] = ('loss',)) -> dict:
    """Return the entries of a line that follow from a log, with at most `points` records."""
    training = [record for record in records if is_training(record)]
    entries: dict[str, Any] = {}
    if training:
        entries['iterations'] = training[-1]['iter']
        if length := epoch_length(records):
            entries['epoch_length'] = length
        if trained(records, 'time'):
            entries['seconds'] = round(float(seconds_at(records, [entries['iterations']])[0]), 1)
        stride = math.ceil(len(training) / points)
        kept = training[(len(training) - 1) % stride :: stride]
        names = [name for name in metrics if any(name in record for record in kept)]
        entries['train'] = _columns(kept, ['iter', *names])
    names = [name for name in validated_metrics(records) if name not in _UNUSED]
    validated = [r for r in records if not is_training(r) and any(name in r for name in names)]
    if validated:
        entries['val'] = _columns(validated, ['step', *names])
    return entries


def _columns(records: Sequence[dict], names: Iterable[str]) -> dict[str, list]:
    return {name: [_short(record.get(name)) for record in records] for name in names}


def _short(value: Any) -> Any:
    return float(f'{value:.6g}') if isinstance(value, float) else value


def last_validation(records: Sequence[dict]) -> dict[str, float]:
    return {
        name: record[name]
        for record in records
        if not is_training(record)
        for name in validated_metrics(records)
        if name in record and name not in _UNUSED
    }


def write_lines(path: Path, runs: Iterable[Mapping[str, Any]]) -> None:
    with write_whole(path) as file:
        file.writelines(_line(run).encode() for run in runs)


def append_line(path: Path, run: Mapping[str, Any]) -> None:
    """Add a run by one write, which other processes may do at the same time."""
    if path.exists() and path.stat().st_size and not path.read_bytes().endswith(b'\n'):
        write_lines(path, read_lines(path).values())
    with path.open('a', encoding='utf-8') as file:
        file.write(_line(run))


def _line(run: Mapping[str, Any]) -> str:
    return json.dumps(run, ensure_ascii=False, separators=(',', ':')) + '\n'
