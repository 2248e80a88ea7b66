import argparse
import platform
import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aft_mm.checkpoint import latest_checkpoint, load_from_local
from aft_mm.checks import check_int
from aft_mm.config.finding import PACKAGE
from aft_mm.config.reading import read_config
from aft_mm.config.texts import read_table
from aft_mm.errors import CONFIG_ERRORS, UserError, user_errors
from aft_mm.outputs import check_output

from .. import __version__
from .run_files import (
    POINTS,
    config_name,
    curves,
    last_validation,
    read_lines,
    seed_of,
    write_lines,
)
from .run_logs import read_scalars

TESTED = ('metrics.json', 'test.json')
_PLATFORM = re.compile(r'^ {4}(sys\.platform|GPU [\d,]+): (.+)$', re.M)
_VERSION = re.compile(r'^ {4}(Python|PyTorch|TorchVision|MMEngine): (\S+)', re.M)
_DEVICE = re.compile(r'parameters on (.+?), torch ')
_ORIGIN = 'This run: aft_mm at {}, {}'
_LOOPS = 'native backend used for '


def collected(name: str, sources: Sequence[Path], args: argparse.Namespace) -> dict[str, Any]:
    folders = [source for source in sources if source.is_dir()]
    logs = folders or [source for source in sources if source.suffix == '.jsonl']
    tests = [source for source in sources if source.suffix == '.json' and source not in logs]
    tests += [folder / file for folder in folders for file in TESTED if (folder / file).is_file()]
    metrics = read_table(tests[0]) if tests else None
    if metrics and 'rows' in metrics:
        return {'name': name, **metrics}
    return line(
        name,
        read_scalars(logs[0]) if logs else [],
        metrics,
        facts_of(folders[0]) if folders else {},
        args.points,
        args.metric,
    )


def line(
    name: str,
    records: Sequence[dict],
    metrics: dict[str, Any] | None,
    facts: dict[str, Any],
    points: int = POINTS,
    curve: Sequence[str] = ('loss',),
) -> dict[str, Any]:
    """Return the line of a run; an entry ``lr`` of the metrics becomes one of the run."""
    metrics = last_validation(records) if metrics is None else dict(metrics)
    entries = curves(records, points, curve)
    shape = {key: entries.pop(key) for key in ('train', 'val') if key in entries}
    run: dict[str, Any] = {'name': name, 'config': config_name(name), 'seed': seed_of(name)}
    run |= {'lr': metrics.pop('lr', None), **facts, **entries, 'metrics': metrics, **shape}
    return {key: value for key, value in run.items() if value is not None}


def facts_of(work_dir: Path) -> dict[str, Any]:
    """Return config, seed, rate, command, commit, versions, machine and use of C++ loops of a run."""
    facts: dict[str, Any] = {}
    configs = sorted(work_dir.glob('*/vis_data/config.py'))
    if configs:
        config = read_config(str(configs[-1]))
        optimizer = config.get('optim_wrapper', {}).get('optimizer', {})
        facts |= {'seed': config.get('randomness', {}).get('seed'), 'lr': optimizer.get('lr')}
    names = [path.stem for path in work_dir.glob('*.py')]
    if len(names) == 1:
        facts['config'] = names[0]
    with suppress(UserError):  # the checkpoints were removed
        path, _ = latest_checkpoint(work_dir)
        checkpoint = load_from_local(path, map_location='cpu') if path else {}
        facts['command'] = checkpoint.get('message_hub', {}).get('runtime_info', {}).get('command')
    logs = sorted(work_dir.glob('*/*.log'))
    text = logs[-1].read_text(encoding='utf-8', errors='replace') if logs else ''
    found = re.search(_ORIGIN.format('(.+?)', '(.+)'), text)
    facts['commit'] = found[1] if found else commit()
    facts['versions'] = dict(_VERSION.findall(text)) or None
    devices = [device for _, device in _PLATFORM.findall(text)] + _DEVICE.findall(text)[:1]
    facts['machine'] = ', '.join([found[2], *devices] if found else devices) or None
    facts['loops'] = _LOOPS in text if found else None
    return {key: value for key, value in facts.items() if value is not None}


def commit() -> str | None:
    if not (PACKAGE.parent / '.git').exists():
        return None
    command = ['git', 'describe', '--always', '--dirty', '--abbrev=40', '--exclude=*']
    try:
        done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def origin() -> str:
    """Return the line of a training's log that names its code and processor."""
    return _ORIGIN.format(commit() or __version__, processor())


def processor() -> str:
    cpuinfo = Path('/proc/cpuinfo')
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.machine()


def run(args: argparse.Namespace) -> None:
    with user_errors(*CONFIG_ERRORS):
        check_int('--points', args.points, 1)
        check_output('--out', args.out, ('.jsonl',))
        sources: dict[str, list[Path]] = defaultdict(list)
        for path in args.runs:
            if not path.is_dir() and not (path.is_file() and path.suffix in ('.json', '.jsonl')):
                raise UserError(f'RUN must be a folder, .jsonl or .json, got {str(path)!r}')
            if path.resolve() == Path(args.out).resolve():
                raise UserError(f'RUN must be another file than --out, got {str(path)!r} for both')
            sources[path.name if path.is_dir() else path.stem].append(path)
        out = Path(args.out)
        runs = read_lines(out) if out.exists() else {}
        runs |= {name: collected(name, paths, args) for name, paths in sources.items()}
        write_lines(out, [runs[name] for name in sorted(runs)])
    print(f'wrote {len(sources)} run{"s" if len(sources) > 1 else ""} to {out}')
