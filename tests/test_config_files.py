"""Config files of every encoding and none, and keys that no part of a run takes."""

import os

import pytest
from mmengine.config import Config
from mmengine.hooks import EMAHook
from mmengine.optim import AmpOptimWrapper, LinearLR

from aft_mm.cli.main import main
from aft_mm.config.finding import find_config
from aft_mm.config.reading import check_keys, check_parts, check_settings, parameters, read_config
from aft_mm.engine.hooks.training import CompileHook

from .errors import refuses, refuses_input, stops
from .helpers import each

pytestmark = pytest.mark.usefixtures('here')
TEXT = "model = dict(type='Größe')\n"


@pytest.mark.parametrize('base', [False, True])
def test_a_byte_order_mark_is_no_part_of_a_config(base, here):
    (here / 'a.py').write_text(TEXT, encoding='utf-8-sig')
    if base:
        (here / 'b.py').write_text("_base_ = 'a.py'\n", encoding='utf-8-sig')
    config = read_config('b.py' if base else 'a.py')
    assert config.model.type == 'Größe'
    config.dump('copy.py')
    assert read_config('copy.py').model == config.model


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (TEXT.encode('utf-16'), 'must be a text in UTF-8, got UTF-16'),
        (TEXT.encode('utf-16-be'), 'must be a text in UTF-8, got a binary file or another'),
        (b'a = 1\0', 'must be a text in UTF-8, got zero bytes'),
        (TEXT.encode('latin-1'), 'must be a text in UTF-8, got a binary file .* in byte 21'),
        (b'\x89PNG\r\n\x1a\n\0\0', 'must be a text in UTF-8, got a binary file'),
        (b'', 'must have entries such as model, got none'),
        (b'# model = dict()\n\n', 'must have entries such as model, got none'),
        ('\ufeff'.encode(), 'must have entries such as model, got none'),
        (b'"""A config."""\n', 'must have entries such as model, got none'),
    ],
)
def test_other_files_are_refused_in_one_sentence(content, message, here):
    (here / 'a.py').write_bytes(content)
    refuses_input(f"config 'a.py' {message}", read_config, 'a.py')
    stops(f"config 'a.py' {message}", main, ['train', 'a.py'])


def test_what_is_no_file_is_said(here):
    (here / 'folder.py').mkdir()
    refuses_input(
        "config 'folder.py' must be a Python file, got a folder", find_config, 'folder.py'
    )
    os.mkfifo(here / 'pipe.py')
    refuses_input("config 'pipe.py' is not a file", find_config, 'pipe.py')
    (here / 'link.py').symlink_to('nothing.py')
    refuses_input("config 'link.py' is not a file", find_config, 'link.py')
    (here / 'mini').mkdir()  # a part of many names
    refuses_input("config 'mini' must be a Python file, got a folder", find_config, 'mini')
    (here / 'quickstart').mkdir()  # the name of a config of ours, too
    assert 'aft-conv-quickstart' in find_config('quickstart')


def run_of(**changes):
    config = Config(
        dict(
            default_scope='mmpretrain',
            train_dataloader=dict(batch_size=2, num_workers=0, dataset=dict(type='aft_mm.Digits')),
            train_cfg=dict(by_epoch=True, max_epochs=3),
            val_cfg=dict(),
            optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1)),
            param_scheduler=[dict(type='LinearLR', end=2, convert_to_iter_based=True)],
            default_hooks=dict(logger=dict(type='LoggerHook', interval=2)),
            custom_hooks=[dict(type='EMAHook', momentum=0.1, priority='LOW')],
        )
    )
    config.merge_from_dict({key.replace('__', '.'): value for key, value in changes.items()})
    return config


@pytest.mark.parametrize(
    ('key', 'message'),
    [
        ('train_dataloader__batchsize', 'did you mean batch_size. it may have batch_sampler, '),
        ('train_dataloader__shufle', 'did you mean shuffle'),
        ('val_cfg__fp', 'did you mean fp16. it may have by_epoch, fp16, type'),
        ('train_cfg__max_epoch', 'did you mean max_epochs. it may have by_epoch, dynamic_inter'),
        ('train_cfg__max_iters', 'as it counts epochs: set train_cfg.max_epochs, now 3'),
        ('optim_wrapper__clip_gradient', 'did you mean clip_grad. it may have accumulative_cou'),
        ('optim_wrapper__optimizer__momentun', 'did you mean momentum. it may have dampening, '),
        ('param_scheduler__0__stop', 'it may have begin, by_epoch, convert_to_'),
        ('default_hooks__logger__intervall', 'did you mean interval. it may have backend_args, '),
    ],
)
def test_a_key_that_a_part_does_not_take_is_refused(key, message):
    check_settings(run_of())
    place, _, name = key.replace('__', '.').rpartition('.')
    refuses_input(f"^{place} has no '{name}'.*{message}", check_parts, run_of(**{key: 1}))


def test_a_misspelt_delete_of_mmpretrain_is_left_alone():
    config = run_of()
    config.optim_wrapper.paramwise_cfg = dict(_delete=True, norm_decay_mult=0.0)
    check_parts(config)


def test_hooks_are_a_list():
    message = '^custom_hooks must be a list of dicts, got {'
    config = run_of()
    config.custom_hooks = dict(type='EMAHook')
    refuses_input(message, check_parts, config)


def test_runs_by_iterations_say_what_to_set():
    config = run_of()
    config.train_cfg = dict(type='IterBasedTrainLoop', max_iters=1200)
    check_parts(config)
    config.train_cfg.max_epochs = 2
    message = "^train_cfg has no 'max_epochs', as it counts iterations: set train_cfg.max_iters"
    refuses_input(f'{message}, now 1200$', check_parts, config)
    refuses_input('did you mean train_cfg.max_epochs', check_keys, run_of(), ['max_epochs'])
    config = Config(dict(default_hooks=dict(logger=dict(interval=3))))
    refuses_input('default_hooks.logger must have a type, got interval', check_parts, config)


def test_arguments_that_go_to_a_base_or_anywhere_are_known():
    assert {'loss_scale', 'clip_grad'} <= parameters(AmpOptimWrapper)
    assert {'start_factor', 'end', 'by_epoch'} <= parameters(LinearLR)
    assert parameters(EMAHook) is None and parameters(CompileHook) is None
    check_parts(run_of(custom_hooks=[dict(type='aft_mm.CompileHook', mode='default')]))


@pytest.mark.parametrize(
    'value', ['[dict(type=1)]', "{'type': 'SGD'}", '[{"lr":0.1}]', '{lr:1}', "{'a.b': -1}"]
)
def test_a_dict_is_no_option(value, tool, capsys):
    with pytest.raises(SystemExit):
        tool('train').parse_args(['quickstart', '--cfg-options', f'a={value}'])
    assert '--cfg-options takes no dict as value, got' in capsys.readouterr().err


def test_the_braces_of_a_name_are_an_option(tool):
    words = ['quickstart', '--cfg-options', 'a=epoch_{}.pth', 'b=epoch_{0:03d}.pth']
    assert tool('train').parse_args(words).cfg_options == dict(a=words[2][2:], b=words[3][2:])


@each(
    'text, value',
    [
        ('/data/my photos', '/data/my photos'),
        ('/data/photos (old) 2', '/data/photos (old) 2'),
        ("['a b', 'c']", ['a b', 'c']),
        ('[/a b/c (d), [1, 2], ( 3 , e f )]', ['/a b/c (d)', [1, 2], (3, 'e f')]),
        ('1, 2', [1, 2]),
        (' 5 ', 5),
        ('"None of it"', 'None of it'),
    ],
)
def test_options_keep_the_spaces_of_texts(tool, text, value):
    words = ['quickstart', '--cfg-options', f'a={text}', 'b=1']
    assert tool('train').parse_args(words).cfg_options == dict(a=value, b=1)


def test_amp_of_mmengine_on_a_cpu_names_the_option(tool, config, here):
    train = tool('train')
    words = [config('tiny'), '--cfg-options', 'optim_wrapper.type=AmpOptimWrapper']
    message = "optim_wrapper.type must be OptimWrapper on cpu, or be set by --amp, .* got '(mmengine.)?Amp"
    stops(message, train.main, words)
    cfg = Config(dict(optim_wrapper=dict(type='AmpOptimWrapper', optimizer=dict(type='SGD'))))
    train.apply_args(cfg, train.parse_args(['tiny', '--amp']))
    assert cfg.optim_wrapper.type == 'aft_mm.AutocastOptimWrapper'
    cfg = Config(dict(optim_wrapper=dict(type='mmengine.AmpOptimWrapper')))
    refuses(message, train.apply_args, cfg, train.parse_args(['tiny']))
    cfg = Config(dict(optim_wrapper=dict(constructor='Two', one={}, other={})))
    message = 'optim_wrapper must have one optimizer with --amp, .*, got constructor, one, other'
    refuses(message, train.apply_args, cfg, train.parse_args(['tiny', '--amp']))
