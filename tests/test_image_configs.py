"""The configs of the papers' tables of images train and sample with all their tokens."""

import math

import dry_run
import numpy as np
import pytest
from mmengine.config import Config
from PIL import Image

from aft_mm.engine import build_runner

from .all_configs import configs_of, fields

HEADLINE = 'aft-local-256-l24-d256_8xb16-200e_cifar10'
PATHS = configs_of('image_ar')
OTHERS = [name for name in PATHS if fields(name)['size'] != 'mini' and name != HEADLINE]


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Random images in the files of CIFAR-10 and MNIST."""
    rng = np.random.default_rng(0)
    for folder in ('cifar10', 'mnist'):
        (tmp_path / folder).mkdir()
    for name in (*(f'data_batch_{i}' for i in range(1, 6)), 'test_batch'):
        records = rng.integers(0, 256, (1, 3073), np.uint8)
        records[:, 0] = 0
        records.tofile(tmp_path / f'cifar10/{name}.bin')
    for split in ('train', 't10k'):
        for name, axes in (('images-idx3', (2, 28, 28)), ('labels-idx1', (2,))):
            header = bytes([0, 0, 8, len(axes)]) + np.array(axes, '>i4').tobytes()
            values = rng.integers(0, 256 if len(axes) > 1 else 10, axes, np.uint8)
            (tmp_path / f'mnist/{split}-{name}-ubyte').write_bytes(header + values.tobytes())
    monkeypatch.setenv('AFT_MM_DATA', str(tmp_path))
    return tmp_path


def train_and_sample(name, folder):
    """Train two iterations of one layer of 32 channels, validate and sample, all else as it is."""
    config = Config.fromfile(PATHS[name])
    config.model.decoder.update(embed_dims=32, num_layers=1)
    config.model.head.embed_dims = 32
    config.train_dataloader.update(batch_size=1)
    config.train_dataloader.dataset.indices = 2
    config.val_dataloader.dataset.indices = 1
    config.train_cfg.update(max_epochs=10**6, val_interval=1)  # beyond any warm-up
    config.default_hooks.stop = dict(type=dry_run.StopAfterHook, iterations=2)
    config.custom_hooks[0].update(interval=1, num_samples=1, num_images=0)
    config.update(work_dir=str(folder / 'run'), experiment_name=name)
    config.default_hooks.logger.interval = 1
    runner = build_runner(config)
    runner.train()
    losses, _ = runner.message_hub.get_scalar('train/loss').data
    assert len(losses) == 2 and np.isfinite(losses).all()
    tested = runner.message_hub.get_scalar('val/bits_per_dim').current()
    assert tested == pytest.approx(math.log2(256), abs=1.5)
    (picture,) = (folder / 'run').rglob('samples_*.png')
    side = config.image_shape[0]
    pixels = np.asarray(Image.open(picture))
    assert min(pixels.shape[:2]) >= side and len(np.unique(pixels)) > 50


def test_the_headline_trains_and_samples(data):
    train_and_sample(HEADLINE, data)


@pytest.mark.nightly
@pytest.mark.parametrize('name', OTHERS)
def test_another_table_row_trains_and_samples(name, data):
    train_and_sample(name, data)
