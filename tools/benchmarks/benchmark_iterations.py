"""Measure the time of a training iteration of several configs, interleaved.

    python tools/benchmarks/benchmark_iterations.py CONFIG ... --amp --rounds 30 --json out.json \\
        --cfg-options train_dataloader.batch_size=8

An iteration loads a batch and runs forward, backward and the update.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from arguments import add_clock, common_parser
from measuring import interleaved
from mmengine.registry import RUNNERS
from record import default_device, fill_in, set_up_torch, write_json

from aft_mm.cli.arguments import add_config_options
from aft_mm.config.reading import check_data
from aft_mm.engine import load_run_config
from aft_mm.errors import CONFIG_ERRORS, user_errors

ROUNDS = 20


def iteration(config: Path, args: argparse.Namespace, work_dir: str) -> Callable[[], None]:
    shared = dict(launcher='none', local_rank=0, cfg_options=args.cfg_options, work_dir=work_dir)
    cfg = load_run_config(argparse.Namespace(config=str(config), **shared))
    cfg.experiment_name, cfg.log_level = config.stem, 'ERROR'
    if args.amp:
        cfg.optim_wrapper.type = 'aft_mm.AutocastOptimWrapper'
    check_data(cfg, 'train')
    runner = RUNNERS.build(cfg)
    wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    loader = runner.build_dataloader(cfg.train_dataloader)
    runner.model.train()
    batches = iter(loader)

    def call() -> None:
        nonlocal batches
        data = next(batches, None)
        if data is None:
            batches = iter(loader)
            data = next(batches)
        runner.model.train_step(data, wrapper)

    return call


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_parser(__doc__)
    parser.add_argument('configs', nargs='+', type=Path, metavar='CONFIG', help='paths of configs')
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision, bfloat16')
    add_clock(parser)
    add_config_options(parser, 'train_dataloader.batch_size=8')
    args = parser.parse_args(arguments)
    fill_in(parser, args)
    if args.device != default_device():
        parser.error(f'argument --device: must be {default_device()}, where configs train here')
    stems = [config.stem for config in args.configs]
    twice = next((stem for stem in stems if stems.count(stem) > 1), None)
    if twice:
        parser.error(f'argument CONFIG: must have different file names, got {twice} twice')
    args.rounds = args.rounds or ROUNDS
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    set_up_torch(args)
    with user_errors(*CONFIG_ERRORS), TemporaryDirectory() as folder:
        calls = {config.stem: iteration(config, args, folder) for config in args.configs}
        times = interleaved(calls, args.rounds, args.device, args.clock)
    rows = [
        dict(config=name, milliseconds=1e3 * statistics.median(values))
        for name, values in times.items()
    ]
    args.configs = [config.stem for config in args.configs]
    write_json(args.json, rows, args)
    for row in rows:
        print(f'{row["config"]:<64}{row["milliseconds"]:8.1f} ms')


if __name__ == '__main__':
    main()
