"""Every leaf of the copy task loads, builds, trains and says in its name what it is."""

import math
import re

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS

from .leaves import build_leaf, leaves, load_leaf

LEAVES = leaves('copy_task')
NAME = re.compile(
    r'(?P<family>transformer|linear|lsh-4|aft-simple|aft-local-(?P<window>8|32)|aft-full)'
    r'-(?:l4-d256(?P<heads>-h8)?_1xb64-10e_copy|(?P<mini>mini)_1xb32-10e_copy-t32)'
)
MIXERS = {
    'transformer': dict(type='aft_mm.SoftmaxAttention', num_heads=8),
    'linear': dict(type='aft_mm.LinearAttention', num_heads=8),
    'lsh-4': dict(
        type='aft_mm.LSHAttention', num_heads=8, num_rounds=4, num_buckets=8, chunk_size=32
    ),
    'aft-simple': dict(type='aft_mm.AFTSimple'),
    'aft-local-32': dict(type='aft_mm.AFTLocal', window=32, rank=64),
    'aft-full': dict(type='aft_mm.AFTFull', rank=64),
}
# Of 32 tokens instead of 128.
SMALL = {
    **MIXERS,
    'lsh-4': dict(MIXERS['lsh-4'], chunk_size=8),
    'aft-local-8': dict(MIXERS['aft-local-32'], window=8),
}
del SMALL['aft-local-32']
every_leaf = pytest.mark.parametrize('name', LEAVES)


def load(name):
    return load_leaf(LEAVES[name])


def test_every_mixer_has_a_large_and_a_small_leaf():
    found = [NAME.fullmatch(name) for name in LEAVES]
    expected = [(family, False) for family in MIXERS] + [(family, True) for family in SMALL]
    assert sorted((m['family'], bool(m['mini'])) for m in found) == sorted(expected)
    assert all(m['mini'] or bool(m['heads']) == (m['family'][:3] != 'aft') for m in found)


@every_leaf
def test_leaves_of_a_size_differ_in_the_mixer_only(name):
    config, match = load(name).to_dict(), NAME.fullmatch(name)
    mini = 'transformer-mini_1xb32-10e_copy-t32'
    reference = load(mini if match['mini'] else 'transformer-l4-d256-h8_1xb64-10e_copy').to_dict()
    mixers = SMALL if match['mini'] else MIXERS
    assert config['model']['decoder'].pop('token_mixer') == mixers[match['family']]
    del reference['model']['decoder']['token_mixer']
    assert config == reference


def test_the_small_protocol_is_a_quarter_of_the_large_one():
    config = load('linear-mini_1xb32-10e_copy-t32')
    assert config.model.decoder.embed_dims == config.model.head.embed_dims == 64
    splits = [config[f'{split}_dataloader'].dataset for split in ('train', 'val', 'test')]
    assert config.model.decoder.grid == (32,) and {data.max_length for data in splits} == {32}
    assert config.train_dataloader.batch_size == config.auto_scale_lr.base_batch_size == 32
    assert config.train_dataloader.dataset.num_samples * config.train_cfg.max_epochs == 32 * 1000
    assert config.param_scheduler[0].milestones == [800]


def test_the_protocol_is_that_of_the_paper():
    config = load('linear-l4-d256-h8_1xb64-10e_copy')
    assert config.train_dataloader.batch_size == config.auto_scale_lr.base_batch_size == 64
    assert config.model.decoder.num_layers == 4
    model = build_leaf(LEAVES['linear-l4-d256-h8_1xb64-10e_copy'])
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    (schedule,) = config.param_scheduler
    assert type(wrapper.optimizer).__name__ == 'RAdam' and wrapper.get_lr()['lr'] == [1e-3]
    assert schedule == dict(type='MultiStepLR', milestones=[3000], gamma=0.1, by_epoch=False)
    data = DATASETS.build(config.train_dataloader.dataset)
    assert (data.max_length, data.num_symbols) == (128, 10)
    assert len(data) // 64 * config.train_cfg.max_epochs == 10_000
    for evaluator in config.val_evaluator:
        METRICS.build(evaluator)
    for hook in config.default_hooks.values():
        HOOKS.build(hook)


@every_leaf
def test_models_train_and_are_measured(name):
    config = load(name)
    torch.manual_seed(0)
    model = MODELS.build(config.model)
    data = DATASETS.build(config.test_dataloader.dataset)
    samples = [data[index] for index in range(4)]
    batch = {key: [sample[key] for sample in samples] for key in samples[0]}
    batch = model.data_preprocessor(batch, training=True)
    loss = model(**batch, mode='loss')['loss']
    loss.backward()
    assert loss.item() == pytest.approx(math.log(11), abs=0.7)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    metrics = {}
    for evaluator in config.test_evaluator:
        metric = METRICS.build(evaluator)
        metric.process(None, [sample.to_dict() for sample in model(**batch, mode='predict')])
        metrics.update(metric.compute_metrics(metric.results))
    assert metrics['bits_per_token'] == pytest.approx(loss.item() / math.log(2), rel=1e-4)
    assert 0 <= metrics['percent_correct_tokens'] < 60
