"""A model with other options than its weights is announced, as their shapes do not show it."""

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import CheckpointLoader

from aft_mm.apis.loading import build_model, load_model
from aft_mm.config.finding import configs_by_name, trained_models
from aft_mm.config.reading import read_config
from aft_mm.config.trained import warn_of_other_options

from .helpers import command, each

NAME = 'deit-mini_1xb64-3e-conv-stem_pathfinder'
MIXER = 'model.backbone.token_mixer'
HEADS = 'backbone.token_mixer.num_heads=4, trained with 2'
START = 'the model has other options than its weights: '


@pytest.fixture
def warned(monkeypatch):
    lines = []
    monkeypatch.setattr('aft_mm.config.trained.warn', lines.append)
    return lines


def saved(path, **options):
    """Write a checkpoint as mmengine does, without the state of the training."""
    config = read_config(str(configs_by_name()[NAME]), options)
    meta = dict(cfg=config.pretty_text, experiment_name=NAME)
    torch.save(dict(meta=meta, state_dict=build_model(config).state_dict()), path)
    return config, str(path)


@each(
    'options, expected',
    [
        ({}, ''),
        ({f'{MIXER}.num_heads': 2}, HEADS),
        ({'model.head.type': 'mmpretrain.LinearClsHead'}, ''),  # the same as without its registry
        (
            {f'{MIXER}': dict(type='aft_mm.LinearAttention', num_heads=4)},
            'backbone.token_mixer.type=',
        ),
        ({'data_preprocessor.mean': [21]}, 'preprocessor.mean=(20,), trained with (21,)'),
        # What only the training reads, and another way to write the same.
        ({'model.backbone.drop_path_rate': 0.3, 'model.backbone.frozen_stages': 1}, ''),
        ({'data_preprocessor.mean': (20,), 'model.backbone.init_cfg.std': 0.5}, ''),
        ({'model.backbone.bfloat16': True, 'optim_wrapper.optimizer.lr': 1.0}, ''),
    ],
)
def test_options_that_change_the_outputs_are_named(options, expected, tmp_path, warned):
    _, path = saved(tmp_path / 'a.pth', **options)
    load_model(str(configs_by_name()[NAME]), path)
    assert len(warned) == bool(expected)
    assert not expected or warned.pop().startswith(START + expected)


def test_a_start_is_compared_by_its_mixers(tmp_path, warned):
    _, path = saved(tmp_path / 'a.pth', **{f'{MIXER}.num_heads': 2, 'model.head.topk': (1, 2)})
    options = [f'load_from={path}', 'train_cfg.max_epochs=1', 'model.head.cal_acc=True']
    options += ['data_preprocessor.std=[51]', f'work_dir={tmp_path / "run"}']
    options += [f'{part}_dataloader.dataset.num_samples=64' for part in ('train', 'val', 'test')]
    command('train')([NAME, '--cfg-options', *options])
    assert warned == [START + HEADS]
    command('test')([NAME, path, '--cfg-options', *options[3:]])
    expected = f'{START}{HEADS}; preprocessor.std=(51,), trained with (50,)'
    assert warned[1] == expected
    command('test')([NAME, path, '--tta', '--cfg-options', *options[3:]])
    assert warned[2] == expected


def test_only_the_loader_names_the_text(tmp_path, warned):
    config, path = saved(tmp_path / 'a.pth')
    odd = dict(torch.load(path, weights_only=True), meta=dict(config_text=5))
    torch.save(odd, tmp_path / 'b.pth')
    load_model(config, str(tmp_path / 'b.pth'))
    assert 'config_text' not in CheckpointLoader.load_checkpoint(str(tmp_path / 'b.pth'))['meta']
    assert not warned


def test_an_export_of_the_same_options_is_silent(tmp_path, warned):
    _, path = saved(tmp_path / 'a.pth')
    command('export')([NAME, path, tmp_path / 'a.pt2'])
    assert not warned


def test_the_weights_that_come_with_configs_have_their_options(warned):
    for name, model in trained_models().items():
        text = CheckpointLoader.load_checkpoint(model.weights, 'cpu')['meta']['config_text']
        assert 'model = dict(' in text, name
        warn_of_other_options(read_config(str(configs_by_name()[model.config])), text)
        assert not warned, name


@each(
    'text',
    [
        '', 'model = None', 'model = dict(type=print(1))', '\x00', 'model = [', 'model = {{}: 1}',
        'model = ' + '(' * 9999, 'model = ' + '-' * 99999 + '1', 'model = ' + '[' * 90 + ']' * 90,
        'a' + '.b' * 600 + ' = 1', 'model = dict(a=[' + '1,' * 2**21 + '])',
    ],
)  # fmt: skip
def test_a_text_that_is_no_config_is_not_compared(text, warned):
    warn_of_other_options(Config(dict(model=dict(type='x'))), text)
    assert not warned


@each(
    'model, text',
    [
        (dict(a=[(1, 2), (3, 4)], b=(1.0,)), 'dict(a=[[1, 2], [3, 4]], b=[1])'),
        (dict(norm_cfg=dict(type='BN')), "dict(norm_cfg=dict(type='SyncBN'))"),
        (dict(type=Config), "dict(type='mmengine.config.Config')"),
        (dict(head=dict(thr=0.3)), 'dict(head=dict())'),
    ],
)
def test_other_ways_to_write_the_same_are_silent(model, text, warned):
    warn_of_other_options(dict(model=model), f'model = {text}')
    assert not warned


def test_an_option_that_one_side_leaves_out_has_its_default(warned):
    config = Config(dict(model=dict(maps=[dict(stride=4.0), {}], gate='tanh')))
    warn_of_other_options(config, 'model = dict(maps=[dict(stride=4), dict(size=3)])')
    assert warned.pop() == (
        f"{START}gate='tanh', trained with its default; maps.1.size=its default, trained with 3"
    )
    pixels = dict(type='aft_mm.MaskedDataPreprocessor', preprocessor=dict(mean=[0, 0, 0]))
    odd = {5: '\x1b[2J' * 99, 'data_preprocessor': dict(preprocessor=dict(mean=[1, 1, 1]))}
    warn_of_other_options(dict(model=dict(data_preprocessor=pixels)), f'model = {odd}')
    (line,) = warned
    assert 'preprocessor.preprocessor.mean=(0, 0, 0), trained with (1, 1, 1)' in line
    assert '\x1b' not in line and len(line) < 400
