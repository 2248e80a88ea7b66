"""Train configs that are compared: a learning rate for each by short runs, then several seeds.

    python tools/analysis_tools/train_grid.py CONFIG ... --out FOLDER --rates 1e-4 3e-4 1e-3
        --short train_dataloader.dataset.samples_per_epoch=800 --seeds 0 1 2 --amp
        --cfg-options train_cfg.max_epochs=1 train_dataloader.dataset.samples_per_epoch=2000

FOLDER gets two files for each run of a seed: NAME_seedN.json with what tools/test.py measures and
the rate, and NAME_seedN.jsonl with the scalars of the training; and for each short run
NAME_lrX.json with its last validation. The rate with the best validation is the one of all seeds;
short runs have the first seed. A run that has its file, and is of that rate, is not run again, so
that the same command goes on where an earlier one was stopped: all rates of all configs first, then
seed after seed. A folder belongs to one set of options.
"""

import argparse
import json
import os
import runpy
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path

from aft_mm.errors import UserError, user_errors


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('configs', nargs='+', type=Path, metavar='CONFIG')
    parser.add_argument('--out', type=Path, required=True, metavar='FOLDER', help='of the results')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs'), help='of the runs')
    parser.add_argument('--rates', type=float, nargs='*', default=[], metavar='LR')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], metavar='N')
    parser.add_argument(
        '--metric',
        default='bits_per_char',
        help='that rates are chosen by, less is better; %(default)s',
    )
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision, bfloat16')
    parser.add_argument(
        '--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='of all runs'
    )
    parser.add_argument(
        '--short',
        nargs='+',
        default=[],
        metavar='KEY=VALUE',
        help='of the runs that choose the rate, on top',
    )
    parser.add_argument(
        '--minutes', type=float, default=float('inf'), help='no run starts later than that'
    )
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()  # --help and a wrong argument end before the slow imports

from aft_mm.visualization import read_scalars

TOOLS = Path(__file__).parents[1]


def train(config: Path, work_dir: Path, options: Sequence[str], amp: bool) -> Path:
    """Train anew in `work_dir`; the last checkpoint.

    Raises:
        UserError: the training failed.
    """
    shutil.rmtree(work_dir, ignore_errors=True)
    words = [config, '--work-dir', work_dir, *['--amp'] * amp, '--cfg-options', *options]
    run_tool('train.py', words, work_dir.with_suffix('.log'))
    return Path((work_dir / 'last_checkpoint').read_text())


def run_tool(tool: str, words: Sequence[object], log: Path) -> None:
    """A tool in a process of its own, forked from one that holds the imports and nothing else.

    Raises:
        UserError: it failed, as the last line of its log says.
    """
    context = get_context('forkserver')
    context.set_forkserver_preload(['aft_mm.apis', 'aft_mm.config.reading'])
    log.parent.mkdir(parents=True, exist_ok=True)
    process = context.Process(target=_run, args=(tool, [str(word) for word in words], str(log)))
    process.start()
    process.join()
    if process.exitcode:
        lines = log.read_text().strip().splitlines() or ['nothing']
        raise UserError(f'{tool} {words[0]} ended with {process.exitcode} and said {lines[-1]!r}')


def _run(tool: str, words: list[str], log: str) -> None:
    with open(log, 'w') as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    sys.argv = [str(TOOLS / tool), *words]
    runpy.run_path(sys.argv[0], run_name='__main__')


def validated(work_dir: Path, metric: str) -> float:
    """The last validation of a run.

    Raises:
        UserError: it was not validated by this metric.
    """
    values = [record[metric] for record in read_scalars(work_dir) if metric in record]
    if not values:
        raise UserError(f'--metric must be one that the runs validate, got {metric!r}')
    return values[-1]


def short_run(config: Path, rate: float, args: argparse.Namespace) -> None:
    """Train a while at `rate` and keep the validation."""
    work_dir = args.work_dir / f'{config.stem}_lr{rate:g}'
    options = [
        *args.cfg_options,
        *args.short,
        f'optim_wrapper.optimizer.lr={rate}',
        f'randomness.seed={args.seeds[0]}',
    ]
    train(config, work_dir, options, args.amp)
    value = validated(work_dir, args.metric)
    write(args.out / f'{work_dir.name}.json', {args.metric: value, 'lr': rate})


def seed_run(config: Path, seed: int, args: argparse.Namespace) -> None:
    """Train with `seed` at the best rate, and test."""
    work_dir = args.work_dir / f'{config.stem}_seed{seed}'
    rate = best_rate(config, args)
    options = [*args.cfg_options, f'randomness.seed={seed}']
    options += [f'optim_wrapper.optimizer.lr={rate}'] * (rate is not None)
    checkpoint = train(config, work_dir, options, args.amp)
    tested = work_dir / 'test.json'
    words = [config, checkpoint, '--work-dir', work_dir, '--out', tested]
    words += ['--cfg-options', *args.cfg_options] if args.cfg_options else []
    run_tool('test.py', words, work_dir.with_suffix('.log'))
    scalars = ''.join(json.dumps(record) + '\n' for record in read_scalars(work_dir))
    (args.out / f'{work_dir.name}.jsonl').write_text(scalars)
    write(args.out / f'{work_dir.name}.json', json.loads(tested.read_text()) | {'lr': rate})


def best_rate(config: Path, args: argparse.Namespace) -> float | None:
    """The rate of the best short run; the one there is, or None for that of the config."""
    if len(args.rates) < 2:
        return args.rates[0] if args.rates else None
    runs = [
        json.loads((args.out / f'{config.stem}_lr{rate:g}.json').read_text()) for rate in args.rates
    ]
    return min(runs, key=lambda run: run[args.metric])['lr']


def write(path: Path, content: dict) -> None:
    """A whole file or none: one that is there is taken for a run that is over."""
    unfinished = path.with_suffix('.unfinished')
    unfinished.write_text(json.dumps(content, indent=2) + '\n')
    unfinished.replace(path)


def missing(args: argparse.Namespace) -> Iterator[tuple]:
    """What is left to run: ``(path, function, config, rate or seed)``."""
    for config in args.configs:
        for rate in args.rates if len(args.rates) > 1 else []:
            path = args.out / f'{config.stem}_lr{rate:g}.json'
            if not path.exists():
                yield path, short_run, config, rate
    for seed in args.seeds:
        for config in args.configs:
            path = args.out / f'{config.stem}_seed{seed}.json'
            if not path.exists() or json.loads(path.read_text())['lr'] != best_rate(config, args):
                yield path, seed_run, config, seed


def main(argv: Sequence[str] | None = None) -> None:
    args, start = parse_args(argv), time.monotonic()
    with user_errors(OSError, ValueError):
        for config in args.configs:
            if not config.is_file():
                raise UserError(f'{str(config)!r} is not a config file')
        args.out.mkdir(parents=True, exist_ok=True)
        for path, function, config, value in missing(args):
            if time.monotonic() - start > 60 * args.minutes:
                print('there are runs left')
                return
            function(config, value, args)
            print(path.stem, json.loads(path.read_text())[args.metric], flush=True)


if __name__ == '__main__':
    main()
