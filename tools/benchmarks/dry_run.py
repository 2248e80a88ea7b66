"""Train two iterations of configs at full size on random data, and resume after the first.

Without CONFIG, all configs of docs/tables run. A config passes if the losses are finite, the peak
memory is at most 1.5 times the count of docs/tables/memory.json plus 0.3 GB, and a run that resumes
from the checkpoint of iteration 1 has the same loss in iteration 2.
"""

import argparse
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arguments import positive_int
from measuring import added_peak, in_fresh_process
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from record import ROOT, default_device, write_json
from torch import Tensor
from torch.utils.data import Dataset

from aft_mm.config.reading import read_config
from aft_mm.engine import build_runner
from aft_mm.engine.allocator import return_freed_memory
from aft_mm.registry import DATASETS, HOOKS
from aft_mm.structures import SequenceSample, UtteranceSample


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('configs', nargs='*', type=Path, metavar='CONFIG')
    parser.add_argument(
        '--batch', type=positive_int, default=2, help='samples per iteration; default %(default)s'
    )
    parser.add_argument('--json', type=Path, help='write rows and environment to this file')
    return parser.parse_args(arguments)


MEMORY = ROOT / 'docs/tables/memory.json'
# Temporary buffers, such as the gradients of an LSTM by time step, are not counted.
MOST_TIMES, MOST_GB = 1.5, 0.3
BYTES_PER_PARAMETER = 16
PICTURES = ('aft_mm.SampleHook', 'aft_mm.SuperResolutionHook', 'aft_mm.PointCloudHook')


@HOOKS.register_module(force=True)  # a test imports this file and runs it
class StopAfterHook(Hook):
    def __init__(self, iterations: int) -> None:
        self.iterations = iterations

    def after_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        runner.train_loop.stop_training = runner.iter + 1 >= self.iterations


@DATASETS.register_module(force=True)
class RandomSamples(Dataset):
    """Random samples of the largest size that a model is trained on, the same at every access."""

    def __init__(self, model: dict[str, Any], max_frames: int | None, number: int) -> None:
        self.model = model
        self.max_frames = max_frames
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict:
        rng = np.random.default_rng(index)
        inputs, sample = self._make(rng)
        return dict(inputs=inputs, data_samples=sample)

    def _make(self, rng: np.random.Generator) -> tuple[Tensor, BaseDataElement]:
        model = self.model
        if 'backbone' in model:
            from mmpretrain.structures import DataSample

            size = model['backbone']['img_size']
            image = rng.integers(0, 256, (3, size, size), np.uint8)
            label = int(rng.integers(model['head']['num_classes']))
            return torch.from_numpy(image), DataSample().set_gt_label(label)
        if 'decoder' in model:
            sides = [_tokens(model['decoder'], rng)]
            if model.get('encoder'):
                sides.append(_tokens(model['encoder'], rng, model['decoder']))
            return sides[0], SequenceSample(**dict(zip(('source',), sides[1:], strict=False)))
        encoder = model['encoder']
        width = encoder.get('num_features') or encoder['embedding']['num_features']
        frames = rng.standard_normal((self.max_frames, width), np.float32)
        units = rng.integers(1, model['head']['num_classes'], self.max_frames // 8)
        sample = UtteranceSample(metainfo=dict(name='random', units=tuple(units.tolist())))
        return torch.from_numpy(frames), sample


def _tokens(
    stack: dict[str, Any], rng: np.random.Generator, shared: dict[str, Any] | None = None
) -> Tensor:
    embedding = stack['embedding'] or shared['embedding']
    channels = embedding.get('num_channels', 1)
    shape = (math.prod(stack['grid']), *(() if channels == 1 else (channels,)))
    return torch.from_numpy(rng.integers(0, embedding.get('vocab_size', 256), shape))


def shorten(config: Config, batch: int, folder: str) -> None:
    loader = config.train_dataloader
    samples = dict(
        type='aft_mm.RandomSamples',
        model=config.model,
        max_frames=loader.dataset.get('max_frames'),
        number=batch,
    )
    config.train_dataloader = dict(
        batch_size=batch,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False),
        dataset=samples,
    )
    config.train_cfg.val_interval = 10**9
    if config.train_cfg.get('by_epoch', True):
        config.train_cfg.max_epochs = 10**6  # beyond any warm-up
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.test_cfg = config.test_dataloader = config.test_evaluator = None
    config.custom_hooks = [
        hook for hook in config.get('custom_hooks', []) if hook.type not in PICTURES
    ]
    config.work_dir, config.load_from = folder, None
    config.visualizer = dict(type='Visualizer', vis_backends=[])
    config.log_level = 'WARNING'


def build(config: Config, iterations: int, save: bool) -> Runner:
    """Return a runner that stops after some iterations.

    It saves a checkpoint after each or none, since writing one takes memory that is not counted.
    """
    config.experiment_name = f'{iterations}-{save}'
    by_epoch = config.train_cfg.get('by_epoch', True)
    hook = dict(type='aft_mm.SafeCheckpointHook', interval=1, by_epoch=by_epoch)
    config.default_hooks.checkpoint = hook if save else None
    config.default_hooks.stop = dict(type='aft_mm.StopAfterHook', iterations=iterations)
    return build_runner(config)


def losses(runner: Runner) -> list[float]:
    return runner.message_hub.get_scalar('train/loss').data[0].tolist()


def dry_run(path: str, batch: int) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(path)
        shorten(config, batch, folder)
        runner = build(config, 2, save=False)
        weights = sum(x.nbytes for x in runner.model.parameters())
        peak = 2**20 * added_peak(runner.train, default_device()) + weights
        whole = losses(runner)
        del runner
        build(config, 1, save=True).train()
        (checkpoint,) = Path(folder).glob('*_1.pth')
        config.resume, config.load_from = True, str(checkpoint)
        resumed = build(config, 2, save=True)
        resumed.train()
        return dict(
            losses=whole,
            resumed_losses=losses(resumed),
            peak_gb=peak / 1e9,
            seconds=time.perf_counter() - start,
        )


def passes(row: dict[str, Any]) -> bool:
    return (
        all(map(math.isfinite, row['losses']))
        and len(row['losses']) == 2
        and row['peak_gb'] <= MOST_TIMES * row['counted_gb'] + MOST_GB
        and row['losses'] == row['resumed_losses']
    )


def grouped(paths: list[Path]) -> dict[Path, list[str]]:
    first: dict[str, Path] = {}
    groups: dict[Path, list[str]] = {}
    for path in paths:
        model = read_config(str(path)).model.to_dict()
        key = json.dumps(model, sort_keys=True, default=str)
        if key in first:
            groups[first[key]].append(path.stem)
        else:
            first[key], groups[path] = path, []
    return groups


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    memory = json.loads(MEMORY.read_text(encoding='utf-8'))
    paths = [
        path for path in args.configs or sorted(ROOT.glob('configs/*/*.py')) if path.stem in memory
    ]
    if not paths:
        raise SystemExit(f'Error: CONFIG must be among those of {MEMORY.name}, got none of them')
    args.device = default_device()
    del args.configs
    rows = []
    for path, same in grouped(paths).items():
        count = memory[path.stem]
        saved = count['recomputed' if count['with_cp'] else 'saved']
        total = args.batch * saved + BYTES_PER_PARAMETER * count['parameters']
        row = dict(config=path.stem, same_model=same, counted_gb=total / 1e9)
        try:
            row |= in_fresh_process(dry_run, str(path), args.batch, malloc=return_freed_memory)
            row['ok'] = passes(row)
        except Exception as error:  # also a process that was killed for its memory
            row |= dict(ok=False, error=f'{type(error).__name__}: {error}')
        rows.append(row)
        write_json(args.json, rows, args)
        measured = row.get('error') or (
            f'losses {row["losses"]}, resumed {row["resumed_losses"]}, peak '
            f'{row["peak_gb"]:.2f} GB of {row["counted_gb"]:.2f} counted, {row["seconds"]:.0f} s'
        )
        print(f'{"ok" if row["ok"] else "FAILED"} {row["config"]}: {measured}', flush=True)
    return int(not all(row['ok'] for row in rows))


if __name__ == '__main__':
    raise SystemExit(main())
