"""Run all checks and measurements for a new GPU, part by part, and collect them in one folder.

A part has a folder in OUT_DIR; summary.json and summary.txt are updated after each. A second call
skips parts that succeeded with the same command and commit.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from record import ROOT, commit, device_name, versions

from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('out', type=Path, metavar='OUT_DIR')
    parser.add_argument('--dry-run', action='store_true', help='list the parts and exit')
    return parser.parse_args(arguments)


LIMIT, CHECK_LIMIT = 170, 600
SMALL = 'deit-small aft-small-h384-k11 bound-small-h384-k11'
STEPS = ('conv', 'simple', 'local', 'full', 'local_hard')
# Columns that are not in summary.json.
LONG = ('errors', 'kernels', 'profile')


@dataclass(frozen=True)
class Part:
    """A command that runs in the root of the checkout for at most `limit` seconds.

    '{out}' is the folder of the part, '{python}' the interpreter. `backends` are those of
    AFT_MM_BACKEND, if not the default ones.
    """

    name: str
    why: str
    command: str
    needs: str | None = None
    limit: float = LIMIT
    backends: str = ''

    def words(self, folder: Path) -> list[str]:
        words = [
            word.format(out=folder, python=sys.executable) for word in shlex.split(self.command)
        ]
        return words if self.needs else [sys.executable, *words]


def _check(*ops: str) -> Part:
    return Part(
        f'check-{"-".join(ops)}',
        f'check of the kernels of {", ".join(ops)}',
        f'-m aft_mm doctor --kernels {" ".join(f"aft_{op}" for op in ops)}',
        limit=CHECK_LIMIT,
    )


def _ops(op: str, dtype: str) -> Part:
    return Part(
        f'ops-{op}-{dtype}',
        f'benchmark of aft_{op} in {dtype} for each backend, with kernel times',
        f'tools/benchmarks/benchmark_ops.py --cases {op}-b* --dtype {dtype} --rounds 5 '
        '--json {out}/result.json',
    )


def _models(size: int, form: str, backends: str = '') -> Part:
    return Part(
        f'models-{size}-{form}{"-cuda" if backends else ""}',
        f'images per second at {size} px, {form}, with a profile of AFT-conv',
        f'tools/benchmarks/benchmark_models.py --size {size} --forms {form} --models {SMALL} '
        '--rounds 10 --json {out}/result.json',
        backends=backends,
    )


# The kernels in CUDA C++, which no GPU has run yet.
NEW = 'cuda,triton,eager'
TIMED = 'conv-b128-14x14-d384-h384-k11 conv-b32-32x32-d384-h384-k11 conv-b128-14x14-d384-h16-k11'


def _cuda_ops(case: str) -> Part:
    return Part(
        f'cuda-{case}',
        f'{case}: CUDA C++, Triton and torch operations next to flash attention',
        f'tools/benchmarks/benchmark_ops.py --cases {case} --dtype bfloat16 --rounds 5 '
        '--backends cuda triton eager --json {out}/result.json',
    )


def _step(tokens: int) -> Part:
    return Part(
        f'step-{tokens}',
        f'training step of AFT-local-256 and of flash attention, T = {tokens}',
        f'tools/benchmarks/training_step.py --dtype bfloat16 --rounds 10 --tokens {tokens} '
        '--json {out}/result.json',
    )


TRAINING = (
    '-m torch.distributed.run --standalone --nproc_per_node 1 tools/train.py '
    'configs/image_classification/aft-conv-quickstart_1xb64-50e_digits.py '
    '--launcher pytorch --amp --work-dir {out}/run --cfg-options train_cfg.max_epochs=1'
)
PARTS = [
    Part('system', 'torch, CUDA and driver', '-m torch.utils.collect_env'),
    Part(
        'cuda-parity',
        'a small case and one of each source against the oracle',
        'tools/benchmarks/benchmark_ops.py --check --cases *conv-b*h384-k11 --dtype bfloat16 '
        'float16 --backends cuda --json {out}/result.json',
    ),
    Part(
        'cuda-memcheck',
        'CUDA C++ kernels in compute-sanitizer, on a small case',
        'compute-sanitizer --tool memcheck --error-exitcode 1 {python} '
        'tools/benchmarks/benchmark_ops.py --check --cases small-conv --dtype bfloat16 float16 '
        '--backends cuda --json {out}/result.json',
        needs='compute-sanitizer',
    ),
    *map(_cuda_ops, TIMED.split()),
    _models(224, 'compiled', NEW),
    _models(512, 'compiled', NEW),
    _models(224, 'eager', NEW),
    _models(512, 'eager', NEW),
    # On request these use kernels that no GPU has run yet, too.
    _check('simple'),
    _check('full_batched'),
    _check('conv'),
    Part(
        'training-cuda',
        'an epoch with the CUDA C++ kernels, compiled, in mixed precision, DistributedDataParallel',
        TRAINING,
        backends=NEW,
    ),
    Part(
        'training',
        'an epoch on digits, compiled, in mixed precision with DistributedDataParallel',
        TRAINING,
    ),
    _models(224, 'compiled'),
    _models(512, 'compiled'),
    _check('local'),
    *(_ops(op, 'bfloat16') for op in ('simple', 'conv', 'local')),
    _models(224, 'eager'),
    _step(3072),
    _models(512, 'eager'),
    _check('full'),
    _ops('full', 'bfloat16'),
    Part(
        'memcheck',
        'kernels in compute-sanitizer, on the smallest cases',
        'compute-sanitizer --tool memcheck --error-exitcode 1 {python} '
        'tools/benchmarks/benchmark_ops.py --check --cases small-* --backends triton '
        '--json {out}/result.json',
        needs='compute-sanitizer',
    ),
    _check(*(f'{op}_step' for op in STEPS)),
    *(_ops(op, 'float32') for op in ('simple', 'conv', 'local')),
    _step(16384),
    Part('backends', 'table of ops and backends', '-m aft_mm.ops'),
]


def stored(folder: Path) -> dict:
    path = folder / 'part.json'
    return json.loads(path.read_text()) if path.exists() else {}


def finished(part: Part, folder: Path, now: str | None) -> bool:
    before = stored(folder)
    same = before.get('command'), before.get('commit')
    return before.get('status') == 'ok' and same == (part.command, now)


def call(
    words: Sequence[str], log: Path, limit: float, backends: str = ''
) -> tuple[str, int | None]:
    environment = {**os.environ, 'PYTHONUNBUFFERED': '1'}
    if backends:
        environment[ENVIRONMENT_VARIABLE] = backends
    with log.open('wb') as output:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return 'timed out', None
        finally:
            # Also after a normal end or an interrupt.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    return ('failed' if status else 'ok'), status


def last_line(log: Path) -> str:
    lines = log.read_text(errors='replace').split('\n') if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), '')


def run_part(part: Part, folder: Path, now: str | None) -> dict:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    row = dict(name=part.name, command=part.command, commit=now)
    if part.needs and shutil.which(part.needs) is None:
        row.update(status='skipped', last_line=f'{part.needs} is not installed')
    else:
        log, start = folder / 'log.txt', time.monotonic()
        status, exit_status = call(part.words(folder), log, part.limit, part.backends)
        row.update(status=status, exit_status=exit_status, last_line=last_line(log))
        row['seconds'] = round(time.monotonic() - start, 1)
    # Atomic, because the file marks the end of the part.
    partial = folder / 'part.json.partial'
    partial.write_text(json.dumps(row, indent=2) + '\n')
    partial.replace(folder / 'part.json')
    return row


def line(row: dict) -> str:
    seconds = f'{row["seconds"]:.0f} s' if 'seconds' in row else ''
    return f'{row["name"]:<28}{row["status"]:<11}{seconds:>6}  {row["last_line"][:100]}'


def measurements(path: Path) -> list[dict]:
    """Return the rows of a JSON without long columns; empty if the file is incomplete."""
    try:
        rows = json.loads(path.read_text())['rows']
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return [{name: row[name] for name in row if name not in LONG} for row in rows]


def summarise(parts: Sequence[Part], out: Path, device: str) -> list[dict]:
    rows = []
    for part in parts:
        unknown = dict(name=part.name, status='not run', last_line='')
        rows.append(stored(out / part.name) or unknown)
        if results := measurements(out / part.name / 'result.json'):
            rows[-1]['results'] = results
    about = dict(device=device, commit=commit(), versions=versions(), parts=rows)
    (out / 'summary.json').write_text(json.dumps(about, indent=2) + '\n')
    (out / 'summary.txt').write_text(f'{device}\n' + ''.join(f'{line(row)}\n' for row in rows))
    return rows


def begin(out: Path) -> None:
    summary = out / 'summary.json'
    ours = summary.is_file() and 'parts' in json.loads(summary.read_text())
    if out.exists() and not (out.is_dir() and (ours or not any(out.iterdir()))):
        raise SystemExit(
            f'Error: OUT_DIR must be a new or empty folder, or that of an earlier call, '
            f'got {str(out)!r}'
        )
    out.mkdir(parents=True, exist_ok=True)


def list_parts(parts: Sequence[Part], out: Path) -> None:
    now = commit()
    for part in parts:
        state = 'finished' if finished(part, out / part.name, now) else 'to do'
        print(f'{part.name:<28}{state:<10}at most {part.limit:.0f} s: {part.why}')
        backends = f'{ENVIRONMENT_VARIABLE}={part.backends} ' if part.backends else ''
        print(f'    {backends}{part.command}')


def main(arguments: list[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    args = parse_args(arguments)
    out = args.out.resolve()
    if args.dry_run:
        list_parts(parts, out)
        return 0
    if not torch.cuda.is_available():
        raise SystemExit('Error: torch finds no CUDA device to measure')
    begin(out)
    device, now = device_name('cuda'), commit()
    rows = summarise(parts, out, device)
    for part in parts:
        folder = out / part.name
        if finished(part, folder, now):
            print(f'{part.name:<28}finished earlier')
            continue
        print(f'{part.name:<28}{part.why}', flush=True)
        print(line(run_part(part, folder, now)), flush=True)
        rows = summarise(parts, out, device)
    print((out / 'summary.txt').read_text())
    return int(any(row['status'] not in ('ok', 'skipped') for row in rows))


if __name__ == '__main__':
    raise SystemExit(main())
