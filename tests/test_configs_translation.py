"""Every leaf of machine translation loads, builds, trains and says in its name what it is."""

import math
import re

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, HOOKS, METRICS, PARAM_SCHEDULERS

from aft_mm.registry import MODELS
from aft_mm.structures import SequenceSample

from .leaves import build_leaf, leaves, load_leaf
from .parallel_data import MISSING, REASON

LEAVES = leaves('machine_translation')
NAME = re.compile(
    r'(?P<family>transformer|aft-simple|aft-local-(?P<window>\d+))-(?P<size>base|mini)'
    r'_(?P<gpus>\d)xb(?P<batch>\d+)-(?:(?P<epochs>\d+)e|(?P<thousands>\d+)k)'
    r'_(?P<data>wmt14-en-de|multi30k-de-en)'
)
MIXERS = {'transformer': 'SoftmaxAttention', 'aft-simple': 'AFTSimple', 'aft-local': 'AFTLocal'}
every_leaf = pytest.mark.parametrize('name', LEAVES)


def fields(name):
    return NAME.fullmatch(name).groupdict()


def load(name):
    return load_leaf(LEAVES[name])


def count(name):
    return sum(parameter.numel() for parameter in build_leaf(LEAVES[name]).parameters())


def test_every_self_attention_has_a_large_and_a_small_leaf():
    found = {(re.sub(r'-\d+$', '', m['family']), m['size']) for m in map(fields, LEAVES)}
    assert found == {(family, size) for family in MIXERS for size in ('base', 'mini')}
    assert len(LEAVES) == 6


@every_leaf
def test_leaves_differ_in_the_self_attention_of_the_decoder_only(name):
    field, config = fields(name), load(name).to_dict()
    schedule = f'{field["thousands"]}k' if field['thousands'] else f'{field["epochs"]}e'
    reference = load(
        f'transformer-{field["size"]}_{field["gpus"]}xb{field["batch"]}-{schedule}_{field["data"]}'
    ).to_dict()
    mixer = config['model']['decoder'].pop('token_mixer')
    del reference['model']['decoder']['token_mixer']
    assert config == reference
    family = re.sub(r'-\d+$', '', field['family'])
    assert mixer['type'] == f'aft_mm.{MIXERS[family]}'
    assert mixer.get('window') == (int(field['window']) if field['window'] else None)
    for stack, part in (('encoder', 'token_mixer'), ('decoder', 'cross_mixer')):
        assert config['model'][stack][part]['type'] == 'aft_mm.SoftmaxAttention'


@every_leaf
def test_name_says_batch_length_and_data(name):
    field, config = fields(name), load(name)
    assert config.train_dataloader.batch_size == int(field['batch'])
    if field['epochs']:
        assert config.train_cfg.max_epochs == int(field['epochs'])
    else:
        assert config.train_cfg.max_iters == 1000 * int(field['thousands'])
    folder, source, target = re.fullmatch(r'(\w+)-(\w\w)-(\w\w)', field['data']).groups()
    for split in ('train', 'val', 'test'):
        data = config[f'{split}_dataloader'].dataset
        assert data.source_file.endswith(f'.{source}') and data.target_file.endswith(f'.{target}')
        assert f'/{folder}' in data.source_file and data.subwords == config.subwords
        assert data.get('test_mode', False) == (split != 'train')
        grids = config.model.encoder.grid, config.model.decoder.grid
        assert grids == ((data.max_length,),) * 2


@every_leaf
def test_parameters_are_those_of_the_layout(name):
    base, mixer = fields(name)['size'] == 'base', load(name).model.decoder.token_mixer
    dims, layers, values = (512, 6, 37000) if base else (128, 2, 3000)
    linear = dims * dims + dims
    block = 4 * linear + 8 * dims * dims + 5 * dims + 4 * dims
    grid = load(name).model.decoder.grid[0]
    cross, bias = 4 * linear + 2 * dims, 2 * grid * mixer.get('rank', 0)
    table = values * dims + values
    assert count(name) == table + layers * (2 * block + cross + bias) + 4 * dims + dims
    sizes = [count(other) for other in LEAVES if fields(other)['size'] == fields(name)['size']]
    assert max(sizes) < 1.005 * min(sizes)


def test_the_recipe_is_that_of_opennmt():
    config = load('transformer-base_8xb4096-200k_wmt14-en-de')
    model = config.model
    assert (model.encoder.num_layers, model.decoder.num_layers) == (6, 6)
    assert model.head.label_smoothing == model.encoder.drop_rate == model.decoder.drop_rate == 0.1
    assert model.encoder.positions == model.decoder.positions == 'sinusoidal'
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=9.88e-4)
    schedules = []
    for settings in config.param_scheduler:
        settings = dict(dict(end=200_000), **settings)
        schedules.append(PARAM_SCHEDULERS.get(settings.pop('type'))(optimizer, **settings))
    rates = {}
    for step in range(1, 10_001):
        rates[step] = optimizer.param_groups[0]['lr']
        optimizer.step()
        for schedule in schedules:
            schedule.step()
    # 2 · d^-0.5 · min(t^-0.5, t · 8000^-1.5), t counted from 1; mmengine counts from 0.
    for step in (2, 100, 4000, 8000, 10_000):
        noam = 2 * 512**-0.5 * min(step**-0.5, step * 8000**-1.5)
        assert rates[step] == pytest.approx(noam, rel=2e-3), step


@every_leaf
def test_parts_build_and_the_table_is_one(name):
    config, model = load(name), build_leaf(LEAVES[name])
    build_optim_wrapper(model, config.optim_wrapper)
    table = model.decoder.embedding.weight
    assert [n for n, p in model.named_parameters() if p.shape == table.shape] == [
        'decoder.embedding.weight'
    ]
    assert model.encoder.embedding is model.decoder.embedding and model.head.tied
    for hook in config.default_hooks.values():
        HOOKS.build(hook)
    if not MISSING:
        for evaluator in config.test_evaluator:
            METRICS.build(evaluator)


@pytest.mark.parametrize('name', [name for name in LEAVES if '-mini_' in name])
def test_small_models_train(name):
    torch.manual_seed(0)
    model = MODELS.build(load(name).model)
    rows = [torch.randint(3000, (size,)) for size in (9, 17)]
    batch = model.data_preprocessor(
        dict(inputs=rows, data_samples=[SequenceSample(source=row.flip(0)) for row in rows]), True
    )
    loss = model(**batch, mode='loss')['loss']
    loss.backward()
    # Table and hidden vector are as long as they are, so that it begins a little surer than chance.
    assert math.log(3000) < loss.item() < math.log(3000) + 2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.skipif(bool(MISSING), reason=REASON)
def test_the_pack_is_read_as_it_is(shared_data, tmp_path):
    """Real sentences: all lines of the pack, and of its test set no character is lost."""
    if not (shared_data / 'multi30k').is_dir():
        pytest.skip('the data pack multi30k is missing')
    from .parallel_data import converter

    files = [str(shared_data / f'multi30k/val.{language}') for language in ('de', 'en')]
    converter('subwords').main([*files, '--vocab-size', '400', '--out', str(tmp_path / 's.model')])
    data = DATASETS.build(
        dict(
            type='aft_mm.ParallelText',
            source_file=files[0],
            target_file=files[1],
            max_length=400,
            subwords=str(tmp_path / 's.model'),
            test_mode=True,
        )
    )
    assert len(data) == 1014
    for i in (0, 500, 1013):
        sample = data[i]
        assert data.subwords.decode(sample['inputs']) == sample['data_samples'].reference
