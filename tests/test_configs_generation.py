"""Every leaf of super-resolution and point clouds loads, builds and says in its name what it is."""

import logging
import math
import re
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS, RUNNERS
from PIL import Image

from aft_mm.evaluation import ImageQuality, Likelihood, PointCloudDistance

from .leaves import ROOT, build_leaf, leaves, load_leaf

LEAVES = leaves('point_cloud', 'super_resolution')
NAME = re.compile(
    r'(?P<family>image-transformer-local1d|image-transformer-local2d|aft-local1d-hard'
    r'|aft-local2d-hard|aft-local2d|aft-simple|aft-local-(?P<window>\d+))'
    r'-(?:l(?P<layers>\d+)-d(?P<dims>\d+)(?:-h(?P<heads>\d+))?|mini)'
    r'_(?P<gpus>\d+)xb(?P<batch>\d+)-(?P<epochs>\d+)e'
    r'(?:-(?P<what>aft-cross|aft-encoder|softmax-encoder))?'
    r'_(?P<data>celeba|imagefolder|shapenet|modelnet10-mesh|modelnet10)'
    r'-(?:(?P<source>\d+)to(?P<size>\d+)|(?P<classes>all|airplane|chair|car))'
)
# What reads the input: that of the paper, and ours, without a rank.
SOFTMAX = dict(type='aft_mm.SoftmaxAttention', num_heads=8)
FREE = dict(type='aft_mm.AFTFull', rank=None)
SOFT = dict(type='aft_mm.LocalSoftmaxAttention', num_heads=8)
MIXERS = {
    'image-transformer-local1d': dict(SOFT, window=256),
    'image-transformer-local2d': dict(SOFT, window=(16, 16)),
    'aft-local1d-hard': dict(type='aft_mm.AFTLocalHard', window=256),
    'aft-local2d-hard': dict(type='aft_mm.AFTLocalHard', window=(16, 16)),
    'aft-local2d': dict(type='aft_mm.AFTLocal'),
    'aft-local': dict(type='aft_mm.AFTLocal'),
    'aft-simple': dict(type='aft_mm.AFTSimple'),
}
DATA = dict(
    celeba=('aft_mm.CelebA', 'celeba'),
    imagefolder=('aft_mm.ImageFolder', 'images'),
    shapenet=('aft_mm.PointClouds', 'ShapeNetCore.v2.PC15k'),
    modelnet10=('aft_mm.PointClouds', 'modelnet10_pcd'),
)
DATA['modelnet10-mesh'] = ('aft_mm.PointClouds', 'ModelNet10.PC15k')
IMAGES = [name for name in LEAVES if 'to' in name.split('-')[-1]]
POINTS = [name for name in LEAVES if name not in IMAGES]
MINI = [name for name in LEAVES if '-mini_' in name]
FULL = [name for name in LEAVES if name not in MINI]

every_leaf = pytest.mark.parametrize('name', LEAVES)


def load(name):
    return load_leaf(LEAVES[name])


def build(name):
    return build_leaf(LEAVES[name])


def fields(name):
    return NAME.fullmatch(name).groupdict()


def loaders(config):
    return [config[f'{split}_dataloader'] for split in ('train', 'val', 'test')]


@every_leaf
def test_name_says_the_mixers(name):
    field, decoder = fields(name), load(name).model.decoder
    mixer = dict(decoder.token_mixer)
    expected = dict(MIXERS[re.sub(r'-\d+$', '', field['family'])])
    if mixer['type'] == 'aft_mm.AFTLocal':
        assert mixer.pop('rank') == (64 if name in FULL else 32)
        window = (8, 8) if name in FULL else (4, 4)
        expected['window'] = window if '2d' in name else int(field['window'])
    assert mixer == expected
    assert (len(decoder.grid) == 2) == ('2d' in name)


@pytest.mark.parametrize('name', IMAGES)
def test_name_says_what_reads_the_input(name):
    """Softmax attention of 8 heads, unless the name or, of a small model, its silence says AFT."""
    model, what = load(name).model, fields(name)['what']
    usual = 'aft-cross' if name in MINI else None
    encoder_is_aft = (what or usual) in ('aft-encoder', 'aft-cross')
    assert model.encoder.token_mixer == (FREE if encoder_is_aft else SOFTMAX)
    places = dict(FREE, grid=model.decoder.grid, source_grid=model.encoder.grid)
    cross_is_aft = (what or usual) == 'aft-cross'
    assert model.decoder.cross_mixer == (places if cross_is_aft else SOFTMAX)


@pytest.mark.parametrize(
    'family, whats',
    [
        ('aft-local2d-hard-l32-d256_8xb16-200e', ['aft-encoder', 'aft-cross']),
        ('aft-local2d-mini_1xb8-16e', ['softmax-encoder']),
    ],
)
def test_what_reads_the_input_is_all_that_differs(family, whats):
    configs = []
    for what in ['', *('-' + what for what in whats)]:
        config = load(f'{family}{what}_celeba-8to32').to_dict()
        del config['model']['encoder']['token_mixer'], config['model']['decoder']['cross_mixer']
        configs.append(config)
    assert all(config == configs[0] for config in configs)


@every_leaf
def test_name_says_the_size(name):
    field, model = fields(name), load(name).model
    dims = int(field['dims'] or 128)
    assert model.decoder.num_layers == int(field['layers'] or 4)
    assert model.decoder.embed_dims == model.head.embed_dims == dims
    if name in IMAGES:
        assert model.encoder.embed_dims == dims
        assert model.encoder.num_layers == (2 if name in MINI else 4)


@every_leaf
def test_name_says_the_schedule(name):
    field, config = fields(name), load(name)
    assert config.train_dataloader.batch_size == int(field['batch'])
    assert config.train_cfg.max_epochs == int(field['epochs'])
    if name in FULL:
        assert config.optim_wrapper.optimizer == dict(type='AdamW', lr=3e-3, weight_decay=0.1)
        assert config.auto_scale_lr.base_batch_size == int(field['gpus']) * int(field['batch'])
        assert config.model.decoder.drop_rate == 0.1
        assert config.train_cfg.val_interval == config.custom_hooks[0].interval


@every_leaf
def test_name_says_the_data(name, monkeypatch):
    monkeypatch.delenv('AFT_MM_DATA', raising=False)
    field, config = fields(name), Config.fromfile(LEAVES[name])
    kind, folder = DATA[field['data']]
    for split, loader in zip(('train', 'val', 'test'), loaders(config), strict=True):
        dataset = loader.dataset
        assert dataset.type == kind and DATASETS.get(kind)
        assert dataset.get('test_mode', False) == (split != 'train')
        if field['data'] == 'imagefolder':
            assert dataset.data_root == f'data/images/{split}'
            continue
        assert dataset.data_root == f'data/{folder}'
        missing = 'modelnet10' in field['data'] and split == 'val'
        assert dataset.split == ('test' if missing else split)
        if field['classes']:
            assert dataset.classes in (field['classes'], (field['classes'],))


@pytest.mark.parametrize('name', IMAGES)
def test_name_says_the_sizes_of_the_images(name, tmp_path):
    field, config = fields(name), load(name)
    size, small = int(field['size']), int(field['source'])
    assert config.image_shape == (size, size, 3) and config.source_shape == (small, small, 3)
    assert prod(config.model.decoder.grid) == size**2
    assert config.model.encoder.grid == (small, small)

    image = np.random.default_rng(0).integers(0, 256, (218, 178, 3), np.uint8)
    for split, loader in zip(('train', 'val', 'test'), loaders(config), strict=True):
        packed = dataset_of(loader.dataset, image, tmp_path / split)[0]
        source = packed['data_samples'].source
        assert packed['inputs'].shape == (size**2, 3) and source.shape == (small**2, 3)
        assert packed['inputs'].dtype == source.dtype == torch.uint8
        # A pixel of the source is the mean of those that it stands for.
        pixels = packed['inputs'].double().view(small, size // small, small, size // small, 3)
        gap = pixels.mean((1, 3)).flatten(0, 1) - source
        assert gap.abs().max() <= 0.5 + 1e-6


def dataset_of(config, image, root):
    """The data set of a config with one image of our own as a PNG, which keeps every value."""
    if config.type == 'aft_mm.CelebA':
        (root / 'img_align_celeba').mkdir(parents=True)
        Image.fromarray(image).save(root / 'img_align_celeba/000001.png')
        number = ('train', 'val', 'test').index(config.split)
        (root / 'list_eval_partition.txt').write_text(f'000001.png {number}\n')
    else:
        root.mkdir()
        Image.fromarray(image).save(root / 'one.png')
    return DATASETS.build(dict(config, data_root=str(root)))


@pytest.mark.parametrize('name', POINTS)
def test_point_clouds_become_the_tokens_that_the_model_takes(name, tmp_path):
    config = load(name)
    points, bits = config.point_cloud.num_points, config.point_cloud.num_bits
    model = config.model.decoder
    assert points == (1024 if 'modelnet' in name else 2048)
    assert model.grid == (3 * points,) and model.tokens_per_position == 3
    assert model.embedding.num_kinds == 3
    assert model.embedding.vocab_size == config.model.head.num_classes == 2**bits

    cloud = np.random.default_rng(0).normal(size=(points + 7, 3)).astype(np.float32)
    for split, loader in zip(('train', 'val', 'test'), loaders(config), strict=True):
        folder = tmp_path / 'chair' / loader.dataset.split
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / 'one.npy', cloud)
        dataset = DATASETS.build(dict(loader.dataset, data_root=str(tmp_path), classes=('chair',)))
        np.random.seed(0)
        first, second = dataset[0], dataset[0]
        assert first['inputs'].shape == (3 * points,) and first['inputs'].dtype == torch.uint8
        assert torch.equal(first['inputs'], second['inputs']) == (split != 'train')
        # Of points sorted before they are quantised, z alone is in order.
        triples = first['inputs'].view(-1, 3).tolist()
        assert [z for z, _, _ in triples] == sorted(z for z, _, _ in triples)
        assert (triples == sorted(triples)) == ('modelnet' in name)


@pytest.mark.parametrize('name', IMAGES)
def test_small_sets_of_images_are_flipped(name):
    pipeline = [step.type for step in load(name).train_dataloader.dataset.pipeline]
    assert ('mmpretrain.RandomFlip' in pipeline) == (name in MINI)
    assert pipeline[-2:] == ['aft_mm.SuperResolutionPair', 'aft_mm.PackSequence']


@every_leaf
def test_only_weights_of_linear_layers_are_decayed(name):
    model = build(name)
    groups = build_optim_wrapper(model, load(name).optim_wrapper).optimizer.param_groups
    decayed = {id(p): group['weight_decay'] for group in groups for p in group['params']}

    assert len(decayed) == len(list(model.parameters()))
    for parameter_name, parameter in model.named_parameters():
        # A table is spared, the linear layer that pixels go through is not.
        spared = parameter.ndim == 1 or re.search(
            r'pos_bias|embedding(?!\.projection\.weight)', parameter_name
        )
        assert decayed[id(parameter)] == (0.0 if spared else 0.1), parameter_name


@every_leaf
def test_hooks_and_metrics_fit_the_data(name):
    config = load(name)
    ours = [hook for hook in config.default_hooks.values() if hook.type.startswith('aft_mm.')]
    hooks = [HOOKS.build(hook) for hook in ours + config.custom_hooks]
    names = {type(hook).__name__ for hook in hooks}
    assert {'SkippedDataReportHook', 'EpochSeedHook', 'FiniteLossHook', 'SanityCheckHook'} <= names
    assert not config.train_dataloader.persistent_workers

    likelihood, quality = (METRICS.build(metric) for metric in config.test_evaluator)
    assert isinstance(METRICS.build(config.val_evaluator), Likelihood)
    assert isinstance(likelihood, Likelihood) and likelihood.per == 'dim'
    picture = config.custom_hooks[0]
    assert config.test_cfg.type == 'aft_mm.GenerationTestLoop'
    if name in IMAGES:
        assert isinstance(quality, ImageQuality) and picture.type == 'aft_mm.SuperResolutionHook'
        for part in (quality, hooks[-1]):
            assert part.image_shape == config.image_shape
            assert part.source_shape == config.source_shape
        assert config.test_cfg.temperature == 0.8 and config.test_cfg.num_samples > 1
    else:
        assert isinstance(quality, PointCloudDistance) and picture.type == 'aft_mm.PointCloudHook'
        assert quality.num_bits == picture.num_bits == config.point_cloud.num_bits
        assert picture.up == config.point_cloud.up == ('z' if 'modelnet' in name else 'y')
        assert config.test_cfg.num_samples == 1


def expected_parameters(name):
    """Weights of decoder, encoder and head, added up by hand from the layout."""
    model, dims = load(name).model, load(name).model.decoder.embed_dims
    block = 12 * dims * dims + 13 * dims  # four projections, an MLP of width 4·D, two norms
    cross = 4 * dims * dims + 4 * dims + 2 * dims
    if 'source_grid' in model.decoder.get('cross_mixer', {}):
        cross += prod(model.decoder.grid) * prod(model.encoder.grid)

    def stack(part, extra):
        layers, length = part.num_layers, prod(part.grid) // part.get('tokens_per_position', 1)
        pixels = part.embedding.type == 'aft_mm.PixelEmbedding'
        embedding = (3 + 1) * dims if pixels else (256 + 3) * dims
        return embedding + length * dims + layers * (block + extra) + 2 * dims

    bias = 2 * prod(model.decoder.grid) * model.decoder.token_mixer.get('rank', 0)
    if name in POINTS:
        return stack(model.decoder, bias) + dims + (dims + 1) * 256
    free = prod(model.encoder.grid) ** 2 if 'rank' in model.encoder.token_mixer else 0
    outputs = 10 * (1 + 3 + 3 + 3)
    return (
        stack(model.decoder, cross + bias)
        + dims
        + stack(model.encoder, free)
        + (dims + 1) * outputs
    )


@every_leaf
def test_parameters_are_those_of_the_layout(name):
    assert sum(p.numel() for p in build(name).parameters()) == expected_parameters(name)


def test_every_row_of_the_tables_has_a_leaf():
    table_6 = {
        f'{family}_8xb16-200e_celeba-8to32'
        for family in (
            'image-transformer-local1d-l12-d512-h8',
            'image-transformer-local2d-l12-d512-h8',
            'aft-local2d-hard-l32-d256',
        )
    }
    # Of its models the paper says the classes only.
    table_7 = {
        f'{family}-l24-d256_8xb16-{epochs}e_shapenet-{classes}'
        for family in ('aft-local-256', 'aft-simple')
        for classes, epochs in dict(all=200, airplane=1000, chair=1000, car=1000).items()
    }
    assert table_6 | table_7 <= set(FULL)


@pytest.mark.parametrize('name', [name for name in MINI if 'imagefolder' not in name])
def test_small_models_train(name):
    torch.manual_seed(0)
    config = load(name)
    model = MODELS.build(config.model)
    length, channels = (1024, (3,)) if name in IMAGES else (99, ())
    data = dict(inputs=list(torch.randint(0, 256, (2, length, *channels), dtype=torch.uint8)))
    data = model.data_preprocessor(data, training=True)
    if name in IMAGES:
        for sample in data['data_samples']:
            sample.source = torch.randint(0, 256, (64, 3))

    loss = model(**data, mode='loss')['loss']
    loss.backward()
    assert loss.item() == pytest.approx(math.log(256), abs=1.5)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    'name, numbers',
    [
        (
            'super_resolution/aft-local2d-mini_1xb8-16e_celeba-8to32',
            'bits_per_dim '
            'perplexity_per_dim sample_psnr_db sample_ssim sample_consistency_mse mean_psnr_db mean_ssim '
            'mean_consistency_mse bicubic_psnr_db bicubic_ssim bicubic_consistency_mse',
        ),
        (
            'point_cloud/aft-local-96-mini_1xb4-40e_modelnet10-chair',
            'bits_per_dim perplexity_per_dim mmd_squared_edges coverage_percent 1nna_percent',
        ),
    ],
)
def test_real_files_are_tested_without_a_warning_about_scopes(
    name, numbers, shared_data, tmp_path, monkeypatch, caplog
):
    """A smaller model, and in the place of 1,024 points a hundred."""
    monkeypatch.setenv('AFT_MM_DATA', str(shared_data))
    config = Config.fromfile(ROOT / f'configs/{name}.py')
    dataset = config.test_dataloader.dataset
    if not Path(dataset.data_root).is_dir():
        pytest.skip(f'the pack {Path(dataset.data_root).name} is not at {shared_data}')
    dataset.indices = 3
    config.test_cfg.num_inputs = 2
    for part in filter(None, (config.model.get('encoder'), config.model.decoder)):
        part.update(embed_dims=16, num_layers=1)
    config.model.head.embed_dims = 16
    if 'point' in name:
        dataset.pipeline[-1].num_points = 100
        config.model.decoder.grid = (300,)
    config.update(work_dir=str(tmp_path), experiment_name=name)
    with caplog.at_level(logging.WARNING):
        metrics = RUNNERS.build(config).test()

    assert 'Failed to search registry' not in caplog.text
    assert metrics.keys() == set(numbers.split())
    assert metrics['bits_per_dim'] == pytest.approx(8, abs=1.5)
    assert all(map(math.isfinite, metrics.values()))
