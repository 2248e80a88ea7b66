"""Train SRCNN (arXiv 1501.00092) on the faces of a super-resolution config and test it.

    python tools/benchmarks/super_resolution_baseline.py configs/super_resolution/NAME.py --json OUT.json

SRCNN sharpens the bicubic enlargement by three convolutions (9-1-5 with 64 and 32 channels) and is
trained by the mean squared error with Adam at 1e-3 and a cosine schedule, on mirrored images too.
The epoch with the best PSNR on the validation split is tested, by the numbers of ImageQuality.
"""

import argparse
import copy
from pathlib import Path

from arguments import positive_int


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('config', help='config with pairs of images')
    parser.add_argument('--epochs', type=positive_int, default=60, help='default %(default)s')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2], metavar='N')
    parser.add_argument('--json', type=Path, help='write the results to this file')
    return parser.parse_args(arguments)


if __name__ == '__main__':
    parse_args()  # before the slow imports

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.config import Config
from record import write_json
from rich.progress import track
from torch import Tensor, nn
from torchmetrics.functional.image import peak_signal_noise_ratio

from aft_mm.config.reading import read_config
from aft_mm.errors import DATA_ERRORS, UserError, user_errors
from aft_mm.evaluation.image_quality import image_quality
from aft_mm.images import enlarge_bicubic
from aft_mm.registry import DATASETS

BATCH = 16


def load_pairs(cfg: Config, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, inputs and enlarged inputs of a split, [N, C, H, W] from 0 to 255."""
    listed = cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [cfg.test_evaluator]
    metrics = [x for x in listed if x['type'] == 'aft_mm.ImageQuality']
    if not metrics:
        raise UserError('config must list aft_mm.ImageQuality in test_evaluator, got none')
    shapes = metrics[0]
    samples = list(DATASETS.build(cfg[f'{split}_dataloader'].dataset))
    images = [x['inputs'].numpy().reshape(shapes.image_shape) for x in samples]
    sources = [x['data_samples'].source.numpy().reshape(shapes.source_shape) for x in samples]
    sources = [x.astype(np.uint8) for x in sources]
    enlarged = [enlarge_bicubic(x, shapes.image_shape[:2]) for x in sources]
    stacked = (torch.from_numpy(np.stack(x)) for x in (images, sources, enlarged))
    images, sources, enlarged = (x.float().permute(0, 3, 1, 2) for x in stacked)
    return images, sources, enlarged


def srcnn(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, 64, 9, padding=4),
        nn.ReLU(),
        nn.Conv2d(64, 32, 1),
        nn.ReLU(),
        nn.Conv2d(32, channels, 5, padding=2),
    )


@torch.no_grad()
def sharpen(model: nn.Module, enlarged: Tensor) -> Tensor:
    """Return whole numbers from 0 to 255, as an image file holds."""
    x = enlarged / 255
    return ((x + model(x)).clamp(0, 1) * 255).round()


def measure(images: Tensor, truth: Tensor, source: Tensor) -> dict[str, float]:
    rows = [
        image_quality(*(x[n : n + 1].double() for x in (images, truth, source)))
        for n in range(len(images))
    ]
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def train(pairs: dict[str, tuple[Tensor, Tensor, Tensor]], epochs: int, seed: int) -> nn.Module:
    """Return the model of the epoch with the best PSNR on the validation split."""
    torch.manual_seed(seed)
    images, _, enlarged = pairs['train']
    model = srcnn(images.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    best, best_model = 0.0, copy.deepcopy(model)
    for _ in track(range(epochs), f'seed {seed}'):
        for rows in torch.randperm(len(images)).split(BATCH):
            x, y = enlarged[rows] / 255, images[rows] / 255
            if torch.rand(()) < 0.5:
                x, y = x.flip(3), y.flip(3)
            optimizer.zero_grad()
            F.mse_loss(x + model(x), y).backward()
            optimizer.step()
        schedule.step()
        truth, _, start = pairs['val']
        options = dict(data_range=255.0, dim=(1, 2, 3))
        found = float(peak_signal_noise_ratio(sharpen(model, start), truth, **options))
        if found > best:
            best, best_model = found, copy.deepcopy(model)
    return best_model


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    args.device = 'cpu'
    with user_errors(*DATA_ERRORS):
        cfg = read_config(args.config)
        pairs = {split: load_pairs(cfg, split) for split in ('train', 'val', 'test')}
    truth, source, enlarged = pairs['test']
    rows = [dict(model='bicubic', **measure(enlarged, truth, source))]
    for seed in args.seeds:
        model = train(pairs, args.epochs, seed)
        row = dict(model='SRCNN', seed=seed, epochs=args.epochs)
        rows.append(row | measure(sharpen(model, enlarged), truth, source))
    for row in rows:
        numbers = '  '.join(f'{k} {v:.4f}' for k, v in row.items() if isinstance(v, float))
        print(f'{row["model"]}: {numbers}')
    write_json(args.json, rows, args)


if __name__ == '__main__':
    main()
