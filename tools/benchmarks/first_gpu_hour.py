"""Everything that this project wants to know of a GPU, part by part, into one folder.

    bash tools/benchmarks/first_gpu_hour.sh OUT_DIR
    bash tools/benchmarks/first_gpu_hour.sh OUT_DIR --dry-run    # lists the parts, needs no GPU

The parts come in the order of what is wanted most, each with a time limit, so that half an hour is
worth something, too. A part has a folder in OUT_DIR with log.txt, what it measured as JSON, and
part.json, which says how it ended. A part that failed or ran out of time does not stop the others.
Called again, parts that ended well are left out, if they had the same command and commit. Whenever
a part ends, summary.json holds what was measured so far, but for profiles, and summary.txt how each
part ended. What is to be sent is all of OUT_DIR but OUT_DIR/data, which is what models are trained
on.
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


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog='first_gpu_hour.sh',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('out', type=Path, metavar='OUT_DIR')
    parser.add_argument('--dry-run', action='store_true', help='list the parts and stop')
    return parser.parse_args(arguments)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

import torch
from record import ROOT, commit, device_name, versions

LIMIT = 570
CLASSIFICATION = 'configs/image_classification'
TEXT = 'configs/language_modeling'
SMALL = 'deit-small aft-small-h384-k11 bound-small-h384-k11'
MODELS = f'{SMALL} deit3_small_patch16_224 vit_relpos_small_patch16_224 convnext_tiny'
TINY = 'deit-tiny aft-tiny-h32-k11 aft-tiny-h192-k11 bound-tiny-h32-k11 convnext_femto'
SIZES = (224, 512, 384, 1024)
FAMILIES = ('conv', 'simple', 'local', 'full', 'window')
DTYPES = ('bfloat16', 'float32', 'float16')
# What summary.json leaves out of the rows that were measured.
LONG = ('errors', 'kernels', 'profile')


@dataclass(frozen=True)
class Part:
    """A command that runs in the root of the checkout.

    It begins with a file of Python or '-m' and a module, or with the program that it `needs` beside
    the package. '{out}' is the folder of the part, '{data}' that of the part 'data', '{python}' the
    interpreter. limit: seconds.
    """

    name: str
    why: str
    command: str
    needs: str | None = None
    limit: float = LIMIT

    def words(self, folder: Path) -> list[str]:
        """The command as it is started."""
        words = [
            word.format(out=folder, data=folder.parent / 'data', python=sys.executable)
            for word in shlex.split(self.command)
        ]
        return words if self.needs else [sys.executable, *words]


def _verdict(op: str, dtype: str) -> Part:
    """One op and dtype: the check may take minutes, most of which go into compiling."""
    return Part(
        f'verify-{op}-{dtype}',
        f'the verdict on the kernels of aft_{op} in {dtype}',
        f'-m aft_mm.ops --verify --op aft_{op} --dtype {dtype}',
    )


def _ops(op: str, dtype: str) -> Part:
    return Part(
        f'ops-{op}-{dtype}',
        f'the cases of aft_{op} in {dtype}, backend against backend, with each kernel',
        f'tools/benchmarks/benchmark_ops.py --cases {op}-* --dtype {dtype} --rounds 10 '
        '--json {out}/result.json',
    )


def _sanitizer(tool: str) -> Part:
    return Part(
        tool,
        f'the kernels under compute-sanitizer --tool {tool}, on the smallest cases',
        f'compute-sanitizer --tool {tool} --error-exitcode 1 {{python}} '
        'tools/benchmarks/benchmark_ops.py --check --cases small-* --backends triton '
        '--json {out}/result.json',
        needs='compute-sanitizer',
    )


def _models(name: str, models: str, size: int, form: str) -> Part:
    return Part(
        f'models-{name}-{size}-{form}',
        f'images per second at {size} px, {form}, with a profile of each AFT-conv',
        f'tools/benchmarks/benchmark_models.py --size {size} --forms {form} --models {models} '
        '--json {out}/result.json',
    )


def _training(name: str, config: str, iterations: int) -> Part:
    return Part(
        f'training-{name}',
        f'{iterations} iterations of training with autocast: speed, memory, time of the data',
        f'tools/benchmarks/training_run.py {config} --amp --iterations {iterations} '
        '--work-dir {out}/run --json {out}/result.json',
    )


def _step(tokens: int) -> Part:
    return Part(
        f'step-{tokens}',
        f'AFT-local-256 against flash attention, training step, T = {tokens}',
        f'tools/benchmarks/training_step.py --dtype bfloat16 --rounds 20 --tokens {tokens} '
        '--json {out}/result.json',
    )


def _efficiency(dims: int) -> Part:
    return Part(
        f'efficiency-{dims}',
        f'time and memory against the length of the sequence, D = {dims}',
        f'tools/benchmarks/benchmark_efficiency.py --dims {dims} --patience 2 --rounds 5 '
        '--json {out}/result.json --png {out}/result.png',
    )


PARTS = [
    Part('system', 'torch, CUDA and driver', '-m torch.utils.collect_env'),
    *(_verdict(op, 'bfloat16') for op in ('conv', 'simple', 'local')),
    *(_ops(op, 'bfloat16') for op in ('conv', 'simple', 'local')),
    _models('small', MODELS, 224, 'eager'),
    _step(3072),
    Part('tests', 'the tests that need a GPU',
         '-m pytest -m cuda -n 8 -q --junitxml={out}/result.xml tests'),
    Part('data', 'images and text for the training runs',
         'tools/benchmarks/synthetic_data.py {data}'),
    _training('aft-conv-small', f'{CLASSIFICATION}/aft-conv-small-h384-k11_8xb128-300e_in1k.py',
              150),
    _training('aft-local-32', f'{TEXT}/aft-local-32-l12-d512_8xb16-100e_enwik8-t1024.py', 300),
    *(_models('small', MODELS, size, 'eager') for size in SIZES[1:]),
    *(_verdict(op, 'bfloat16') for op in ('full', 'window')),
    *(_ops(op, 'bfloat16') for op in ('full', 'window')),
    _sanitizer('memcheck'),
    _sanitizer('racecheck'),
    *(_models('small', MODELS, size, 'compiled') for size in SIZES),
    _step(16384),
    _training('deit-small', f'{CLASSIFICATION}/deit-small_8xb128-300e_in1k.py', 150),
    _training('transformer', f'{TEXT}/transformer-l12-d512-h8_8xb16-100e_enwik8-t1024.py', 300),
    _efficiency(256),
    _efficiency(1024),
    *(_verdict(op, dtype) for dtype in ('float32', 'float16') for op in FAMILIES),
    *(_verdict('local_normalized', dtype) for dtype in DTYPES),
    *(_verdict(f'{op}_step', dtype) for dtype in DTYPES for op in FAMILIES),
    Part('backends', 'the table of ops, backends and verdicts', '-m aft_mm.ops'),
    *(_ops(op, 'float32') for op in FAMILIES),
    *(_models('tiny', TINY, size, form) for form in ('eager', 'compiled') for size in SIZES),
]  # fmt: skip


def stored(folder: Path) -> dict:
    """How the part of this folder ended; empty if it did not."""
    path = folder / 'part.json'
    return json.loads(path.read_text()) if path.exists() else {}


def finished(part: Part, folder: Path, now: str | None) -> bool:
    """Whether the part has ended well with this command at this commit."""
    before = stored(folder)
    same = before.get('command'), before.get('commit')
    return before.get('status') == 'ok' and same == (part.command, now)


def call(words: Sequence[str], log: Path, limit: float, data: Path) -> tuple[str, int | None]:
    """Run a command and all that it starts, for so many seconds; its status and exit status."""
    environment = {**os.environ, 'AFT_MM_DATA': str(data), 'PYTHONUNBUFFERED': '1'}
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
            # Also the workers of a part that has ended, and at an interrupt.
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
    return ('failed' if status else 'ok'), status


def last_line(log: Path) -> str:
    """The last line of a log that has one."""
    lines = log.read_text(errors='replace').split('\n') if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), '')


def run_part(part: Part, folder: Path, now: str | None) -> dict:
    """Run a part in a folder of its own and write down how it ended."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    row = dict(name=part.name, command=part.command, commit=now)
    if part.needs and shutil.which(part.needs) is None:
        row.update(status='skipped', last_line=f'{part.needs} is not installed')
    else:
        log, start = folder / 'log.txt', time.monotonic()
        words, data = part.words(folder), folder.parent / 'data'
        status, exit_status = call(words, log, part.limit, data)
        row.update(status=status, exit_status=exit_status, last_line=last_line(log))
        row['seconds'] = round(time.monotonic() - start, 1)
    # Whole or not at all: what is there counts as the end of the part.
    partial = folder / 'part.json.partial'
    partial.write_text(json.dumps(row, indent=2) + '\n')
    partial.replace(folder / 'part.json')
    return row


def line(row: dict) -> str:
    """A row as a line of text."""
    seconds = f'{row["seconds"]:.0f} s' if 'seconds' in row else ''
    return f'{row["name"]:<28}{row["status"]:<11}{seconds:>6}  {row["last_line"][:100]}'


def measurements(path: Path) -> list[dict]:
    """The rows of a JSON that a tool wrote, without what is long; empty if it did not end."""
    try:
        rows = json.loads(path.read_text())['rows']
    except (FileNotFoundError, json.JSONDecodeError):
        return []
    return [{name: row[name] for name in row if name not in LONG} for row in rows]


def summarise(parts: Sequence[Part], out: Path, device: str) -> list[dict]:
    """Write summary.json and summary.txt; the rows of all parts."""
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
    """Take a folder for this; what a part left there earlier is deleted when the part runs again.

    SystemExit for one that holds anything else.
    """
    summary = out / 'summary.json'
    ours = summary.is_file() and 'parts' in json.loads(summary.read_text())
    if out.exists() and not (out.is_dir() and (ours or not any(out.iterdir()))):
        raise SystemExit(
            f'Error: OUT_DIR must be a new or empty folder, or one that an earlier call has begun, '
            f'got {str(out)!r}'
        )
    out.mkdir(parents=True, exist_ok=True)


def list_parts(parts: Sequence[Part], out: Path) -> None:
    """Print what a run would do."""
    now = commit()
    for part in parts:
        state = 'finished' if finished(part, out / part.name, now) else 'to do'
        print(f'{part.name:<28}{state:<10}at most {part.limit:.0f} s: {part.why}')
        print(f'    {part.command}')


def main(arguments: list[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run what is not finished; 1 if a part failed or ran out of time."""
    args = parse_args(arguments)
    out = args.out.resolve()
    if args.dry_run:
        list_parts(parts, out)
        return 0
    if not torch.cuda.is_available():
        raise SystemExit('Error: torch finds no CUDA device, and all of this measures one')
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
    print(f'all of {args.out} but {args.out / "data"} is the answer')
    return int(any(row['status'] not in ('ok', 'skipped') for row in rows))


if __name__ == '__main__':
    raise SystemExit(main())
