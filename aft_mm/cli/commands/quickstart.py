import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from aft_mm.config.finding import PACKAGE, find_config
from aft_mm.errors import UserError, user_errors

NAME = 'aft-conv-quickstart_1xb64-50e_digits'


def call(*argv: str | Path) -> None:
    print('+', *argv, flush=True)
    # Operations of such a small model are faster than synchronising two threads.
    environment = {'OMP_NUM_THREADS': '1', **os.environ}
    # No modules of the current folder, unless it is aft_mm's.
    command = ['-m', *argv] if PACKAGE.parent == Path.cwd() else ['-P', '-m', *argv]
    before = signal.signal(signal.SIGINT, lambda *_: None)  # the process reports its checkpoint
    try:
        status = subprocess.call([sys.executable, *map(str, command)], env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    if status:
        raise SystemExit(status if status > 0 else 128 - status)


def run(args: argparse.Namespace) -> None:
    with user_errors():
        find_config(NAME)
        folder = Path(args.work_dir)
        if folder.exists() and not folder.is_dir():
            raise UserError(f'--work-dir must be a folder, got the file {args.work_dir!r}')
    print(
        'Training AFT-conv on the 1797 handwritten digits of scikit-learn: less than three minutes '
        'on two idle CPU cores, and less than 10 MB in ' + args.work_dir,
        flush=True,
    )
    changes = [f'{key}={value}' for key, value in args.cfg_options.items()]
    options = ['--cfg-options', *changes] if changes else []
    started = time.time()
    call('aft_mm', 'train', NAME, '--work-dir', folder, *options)
    best = [path for path in folder.glob('best_*.pth') if path.stat().st_mtime >= started]
    checkpoint = os.fspath(best[0]) if best else (folder / 'last_checkpoint').read_text().strip()
    metrics, picture = folder / 'metrics.json', folder / 'position_bias.png'
    results: list[str | Path] = ['--work-dir', folder / 'test', '--out', metrics]
    call('aft_mm', 'test', NAME, checkpoint, *results, *options)
    call('aft_mm', 'plot', 'bias', folder / f'{NAME}.py', checkpoint, '--out', picture)
    accuracy = json.loads(metrics.read_text())['accuracy/top1']
    logs = max(path for path in folder.glob('2*') if path.is_dir())
    print(f"""
accuracy:       {accuracy:.2f} % of the held-out fifth
checkpoint:     {checkpoint}
log:            {logs}
position bias:  {picture}""")
    activate = Path(sys.prefix) / 'bin/activate'
    first = ''
    if activate.is_file() and os.environ.get('VIRTUAL_ENV') != sys.prefix:
        first = f'source {os.path.relpath(activate)}; '
    print(f'next:           {first}aft_mm new image-folder photos   # a folder of images per class')
