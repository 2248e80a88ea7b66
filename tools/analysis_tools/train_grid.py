"""Train several configs for a comparison: choose learning rates by short runs, then run seeds.

Each run is a line of FOLDER/runs.jsonl (`aft_mm compare collect`). The short runs use the first
seed and are named NAME_lrX. All seeds use the rate with the best validation, and are named
NAME_seedN; their metrics are those of tools/test.py.

The same command continues after an interruption. Use one folder per set of options.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from aft_mm.analysis.collect_runs import facts_of, line
from aft_mm.analysis.run_files import RUNS, append_line, read_lines
from aft_mm.analysis.run_logs import read_scalars, validations
from aft_mm.cli.arguments import tool_parser
from aft_mm.engine.hooks.sanity import DIVERGED
from aft_mm.errors import UserError, user_errors

TOOLS = Path(__file__).parents[1]
# Holds the options of a run without a result.
UNFINISHED = 'unfinished.json'


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('configs', nargs='+', type=Path, metavar='CONFIG', help='paths of configs')
    parser.add_argument(
        '--out', type=Path, required=True, metavar='FOLDER', help='folder of the results'
    )
    parser.add_argument(
        '--work-dir',
        type=Path,
        default=Path('work_dirs/grid'),
        help='folder of the runs; those of other options are replaced; default %(default)s',
    )
    parser.add_argument(
        '--rates', type=float, nargs='*', default=[], metavar='LR', help='learning rates to try'
    )
    parser.add_argument(
        '--seeds', type=int, nargs='+', default=[0, 1, 2], metavar='N', help='default 0 1 2'
    )
    parser.add_argument(
        '--metric',
        default='bits_per_char',
        help='validation metric for choosing the rate; default %(default)s',
    )
    parser.add_argument(
        '--rule',
        choices=('less', 'greater'),
        help='which values of the metric are better; default less for bits_per_...',
    )
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision (bfloat16)')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        default=[],
        metavar='KEY=VALUE',
        help='config options of all runs',
    )
    parser.add_argument(
        '--short',
        nargs='+',
        default=[],
        metavar='KEY=VALUE',
        help='additional config options of the short runs',
    )
    parser.add_argument(
        '--minutes', type=float, default=float('inf'), help='start no run after this time'
    )
    return parser.parse_args(argv)


def train(config: Path, work_dir: Path, options: Sequence[str], amp: bool) -> Path:
    checkpoint, record = work_dir / 'last_checkpoint', work_dir / UNFINISHED
    settings = json.dumps([str(config), amp, *options])
    resume = checkpoint.exists() and record.exists() and record.read_text() == settings
    if not resume:
        shutil.rmtree(work_dir, ignore_errors=True)
        work_dir.mkdir(parents=True)
        record.write_text(settings)
    flags = ['--amp'] * amp + ['--resume'] * resume
    words = [config, '--work-dir', work_dir, *flags, '--cfg-options', *options]
    run_tool('train.py', words, work_dir.with_name(f'{work_dir.name}.log'))
    return Path(checkpoint.read_text())


def run_tool(tool: str, words: Sequence[object], log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, TOOLS / tool, *map(str, words)]
    with log.open('w') as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        status = process.wait()
    if status:
        lines = log.read_text().strip().splitlines() or ['nothing']
        raise UserError(f'{tool} {words[0]} failed with status {status}; last line: {lines[-1]!r}')


def validated(work_dir: Path, metric: str) -> float:
    values = [value for _, value in validations(read_scalars(work_dir), metric)]
    if not values:
        raise UserError(f'--metric must be a validation metric of the runs, got {metric!r}')
    return values[-1]


def short_run(config: Path, rate: float, args: argparse.Namespace) -> None:
    work_dir = args.work_dir / f'{config.stem}_lr{rate:g}'
    options = [*args.cfg_options, *args.short]
    options += [f'optim_wrapper.optimizer.lr={rate}', f'randomness.seed={args.seeds[0]}']
    facts = {'config': config.stem, 'seed': args.seeds[0], 'lr': rate}
    try:
        train(config, work_dir, options, args.amp)
        metrics = {args.metric: validated(work_dir, args.metric)}
    except UserError as error:
        if DIVERGED not in str(error):
            raise
        metrics, facts['error'] = {args.metric: None}, str(error)
    append_line(args.out / RUNS, line(work_dir.name, [], metrics, facts_of(work_dir) | facts))


def seed_run(config: Path, seed: int, args: argparse.Namespace) -> None:
    work_dir = args.work_dir / f'{config.stem}_seed{seed}'
    rate = best_rate(config, args)
    options = [*args.cfg_options, f'randomness.seed={seed}']
    options += [f'optim_wrapper.optimizer.lr={rate}'] * (rate is not None)
    checkpoint = train(config, work_dir, options, args.amp)
    tested = work_dir / 'test.json'
    words = [config, checkpoint, '--work-dir', work_dir / 'test', '--out', tested]
    words += ['--cfg-options', *args.cfg_options] if args.cfg_options else []
    run_tool('test.py', words, work_dir.with_name(f'{work_dir.name}_test.log'))
    facts = facts_of(work_dir) | {'config': config.stem, 'seed': seed, 'lr': rate}
    metrics = json.loads(tested.read_text())
    run = line(work_dir.name, read_scalars(work_dir), metrics, facts)
    append_line(args.out / RUNS, run)


def best_rate(config: Path, args: argparse.Namespace) -> float | None:
    if len(args.rates) < 2:
        return args.rates[0] if args.rates else None
    runs = [complete(args)[f'{config.stem}_lr{rate:g}'] for rate in args.rates]
    finite = [run for run in runs if run['metrics'][args.metric] is not None]
    if not finite:
        raise UserError(f'--rates must include one with a finite loss, got {args.rates}')
    best = max if args.rule == 'greater' else min
    return best(finite, key=lambda run: run['metrics'][args.metric])['lr']


def complete(args: argparse.Namespace) -> dict[str, dict]:
    path = args.out / RUNS
    return read_lines(path) if path.exists() else {}


def missing(args: argparse.Namespace) -> Iterator[tuple]:
    for config in args.configs:
        for rate in args.rates if len(args.rates) > 1 else []:
            name = f'{config.stem}_lr{rate:g}'
            if name not in complete(args):
                yield name, short_run, config, rate
    for seed in args.seeds:
        for config in args.configs:
            name, rate = f'{config.stem}_seed{seed}', best_rate(config, args)
            run = complete(args).get(name)
            if run is None or run.get('lr') != rate:
                yield name, seed_run, config, seed


def main(argv: Sequence[str] | None = None) -> None:
    args, start = parse_args(argv), time.monotonic()
    with user_errors(OSError, ValueError):
        for config in args.configs:
            if not config.is_file():
                raise UserError(f'{str(config)!r} is not a config file')
        stems = [config.stem for config in args.configs]
        twice = next((stem for stem in stems if stems.count(stem) > 1), None)
        if twice:
            raise UserError(f'CONFIG must be files of different names, got {twice}.py twice')
        if len(args.rates) > 1 and not args.rule and not args.metric.startswith('bits_per_'):
            raise UserError(f'--rule must be less or greater for --metric {args.metric}, got none')
        args.out.mkdir(parents=True, exist_ok=True)
        if next(missing(args), None) is None:
            print(f'nothing to train: all results are in {args.out}')
        for name, function, config, value in missing(args):
            if time.monotonic() - start > 60 * args.minutes:
                print('stopped before all runs were done')
                return
            function(config, value, args)
            (args.work_dir / name / UNFINISHED).unlink()
            print(name, complete(args)[name]['metrics'].get(args.metric, 'done'), flush=True)


if __name__ == '__main__':
    main()
