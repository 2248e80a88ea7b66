"""Measure speed, memory and data loading time of a short training run of a config.

    python tools/benchmarks/training_run.py CONFIG --iterations 200 --amp --json out.json

Times are medians over the iterations after the first fifth. The data time is the time that an
iteration waits for its batch.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from arguments import positive_int
from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from record import default_device, write_json

from aft_mm.cli.arguments import add_run_arguments
from aft_mm.config.reading import check_data
from aft_mm.engine import load_run_config
from aft_mm.errors import CONFIG_ERRORS, user_errors


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config', help='path of the config file')
    parser.add_argument(
        '--iterations',
        type=positive_int,
        default=200,
        help='number of iterations; default %(default)s',
    )
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision, bfloat16')
    parser.add_argument('--json', type=Path, help='write row and environment to this file')
    add_run_arguments(parser)
    return parser.parse_args(arguments)


def shorten(config: Config, iterations: int, amp: bool) -> None:
    config.train_cfg = dict(by_epoch=False, max_iters=iterations, val_interval=iterations + 1)
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.test_cfg = config.test_dataloader = config.test_evaluator = None
    rising = dict(type='LinearLR', start_factor=1e-3, begin=0, end=iterations, by_epoch=False)
    config.param_scheduler = [rising]
    config.default_hooks.checkpoint = None
    if amp:
        config.optim_wrapper.type = 'aft_mm.AutocastOptimWrapper'


def history(runner: Runner, name: str) -> Sequence[float]:
    return runner.message_hub.get_scalar(f'train/{name}').data[0].tolist()


def measured(runner: Runner) -> dict:
    times, waits, losses = (history(runner, name) for name in ('time', 'data_time', 'loss'))
    start, few = len(times) // 5, max(1, len(losses) // 10)
    loader = runner.train_dataloader
    # None with a batch sampler, whose batches vary: their mean.
    batch = loader.batch_size or len(loader.dataset) / len(loader)
    seconds = statistics.median(times[start:])
    row = dict(
        batch=batch,
        iterations=len(times),
        samples_per_second=batch / seconds,
        milliseconds=1e3 * seconds,
        data_milliseconds=1e3 * statistics.median(waits[start:]),
        first_milliseconds=1e3 * times[0],
        first_loss=statistics.fmean(losses[:few]),
        last_loss=statistics.fmean(losses[-few:]),
    )
    if torch.cuda.is_available():
        row['peak_mib'] = torch.cuda.max_memory_allocated() / 2**20
    return row


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    with user_errors(*CONFIG_ERRORS):
        config = load_run_config(args)
        shorten(config, args.iterations, args.amp)
        check_data(config, 'train')
        runner = RUNNERS.build(config)
    runner.train()
    row = dict(config=Path(args.config).stem, amp=args.amp, **measured(runner))
    # The file contains no local paths.
    args.device, args.work_dir, args.config = default_device(), Path(config.work_dir), row['config']
    write_json(args.json, [row], args)
    memory = f', peak {row["peak_mib"]:.0f} MiB' if 'peak_mib' in row else ''
    print(
        f'{row["config"]}: {row["samples_per_second"]:.1f} samples/s, batch {row["batch"]:.4g}, '
        f'{row["data_milliseconds"]:.1f} of {row["milliseconds"]:.1f} ms waiting for data{memory}, '
        f'loss {row["first_loss"]:.3f} to {row["last_loss"]:.3f}'
    )
    return int(not math.isfinite(row['first_loss'] + row['last_loss']))


if __name__ == '__main__':
    raise SystemExit(main())
