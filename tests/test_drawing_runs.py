"""Training runs that write pictures, and tests that sample from the model."""

import json

import mmengine
import numpy as np
import pytest
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.registry import DATASETS, init_default_scope
from PIL import Image


def write_pictures(folder):
    (folder / 'pictures').mkdir()
    values = np.random.default_rng(0).integers(0, 256, (5, 9, 8, 3), dtype=np.uint8)
    for index, image in enumerate(values):
        Image.fromarray(image).save(folder / f'pictures/{index}.png')


def write_clouds(folder):
    values = np.random.default_rng(0).normal(size=(16, 9, 3)).astype(np.float32)
    for index, points in enumerate(values):
        split = ('train', 'val')[index < 5]
        path = folder / 'clouds/chair' / split / f'{index}.npy'
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, points)


# Config, data, picture, and metrics of a test.
RUNS = [
    (
        'tiny_super_resolution',
        write_pictures,
        'super_resolution',
        [
            f'{kind}_{number}'
            for kind in ('sample', 'mean', 'bicubic')
            for number in ('psnr_db', 'ssim', 'consistency_mse')
        ],
    ),
    (
        'tiny_clouds',
        write_clouds,
        'point_clouds',
        ['mmd_squared_edges', 'coverage_percent', '1nna_percent'],
    ),
]


@pytest.mark.parametrize(
    ('name', 'write', 'picture', 'names'), RUNS, ids=[name for name, *_ in RUNS]
)
def test_a_run_writes_samples_and_pictures(run, root, config, here, name, write, picture, names):
    write(here)
    words = '--work-dir work --cfg-options train_cfg.max_epochs=1 custom_hooks=[]'
    result = run(root / 'tools/train.py', config(name), *words.split(), cwd=here)
    assert result.returncode == 0, result.stderr
    (path,) = here.glob(f'work/*/vis_data/vis_image/{picture}_1.png')
    with Image.open(path) as image:
        assert np.asarray(image).std() > 1

    words = 'work/epoch_1.pth --launcher pytorch --out a.json --dump a.pkl --work-dir test '
    words += '--cfg-options test_cfg.num_inputs=3'
    command = root / 'tools/test.py', config(name), *words.split()
    result = run(*command, cwd=here, env={'CUDA_VISIBLE_DEVICES': ''}, ranks=2)
    assert result.returncode == 0, result.stderr
    metrics = json.loads((here / 'a.json').read_text())
    assert {'bits_per_dim', *names} <= metrics.keys()
    assert all(np.isfinite(list(metrics.values())))
    samples = mmengine.load(here / 'a.pkl')
    generated = [sample.get('generated') for sample in samples]
    assert [tokens is not None for tokens in generated] == [True] * 3 + [False] * 2
    assert len({tuple(np.asarray(tokens).flatten().tolist()) for tokens in generated[:3]}) == 3

    built = Config.fromfile(config(name), import_custom_modules=False)
    init_default_scope(built.default_scope)
    dataset = DATASETS.build(built.test_dataloader.dataset)
    alone = Evaluator(built.test_evaluator).offline_evaluate(samples, list(dataset), chunk_size=2)
    assert metrics == pytest.approx(alone, rel=1e-6)
