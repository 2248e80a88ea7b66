"""Mistakes in configs and command lines end with one line before any work."""

import inspect
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from mmengine.config import Config

from aft_mm.config.finding import configs_by_name, find_config
from aft_mm.config.reading import check_keys, check_settings, read_config
from aft_mm.errors import UserError

from ..errors import refuses_input
from ..helpers import ROOT, command

pytestmark = pytest.mark.adversarial

TINY = ROOT / 'tests/configs/tiny.py'


@pytest.fixture
def tool(tool, monkeypatch, here):
    monkeypatch.syspath_prepend(str(ROOT / 'tools/analysis_tools'))

    def run(name, *words):
        call = tool(name).main if '/' in name else command(name.replace('_', '-'))
        call([str(word) for word in words])

    return run


def fails(call, message):
    with pytest.raises(SystemExit, match=f'^Error: .*{message}') as error:
        call()
    assert '\n' not in str(error.value)
    assert len(str(error.value)) < 500


SETTINGS = [
    ('train_cfg.max_epochs=0', 'train_cfg.max_epochs must be an int, 1 or larger, got 0'),
    ('train_cfg.val_interval=1.5', 'train_cfg.val_interval must be an int, 1 or larger, got 1.5'),
    *[
        (f'optim_wrapper.optimizer.lr={value}', 'optimizer.lr must be a finite number, 0 or larger')
        for value in ('abc', 'nan', '-1', 'None')
    ],
    ('optim_wrapper.optimizer.type=Adamm', "type 'Adamm' is not an optimizer; did you mean 'Adam'"),
    ('default_hooks.checkpoint.interval=0', 'default_hooks.checkpoint.interval, .* 1 or larger'),
    ('data_preprocessor.std=[0]', 'data_preprocessor.std must be .* above 0, got'),
    ('data_preprocessor.mean=[nan]', 'data_preprocessor.mean must be a finite number, got'),
    ('resume=/no/such', "resume must be True or False, got '/no/such'"),
    ('train_dataloader.dataset.pipeline=[]', 'train_dataloader.dataset.pipeline must have a step'),
    ('train_dataloader.dataset.indices=0', 'dataset.indices must be an int, 1 or larger, got 0'),
    ('optim_wraper.optimizer.lr=1', "names 'optim_wraper', which the config does not have"),
    ('visualizr.name=a', "names 'visualizr', which the config does not have"),
    ('model.head.num_classes.a=1', '--cfg-options do not fit'),
    ('model.backbone.arch.embed_dims=-3', 'arch.embed_dims must be an int, 1 or larger, got -3'),
    ('model.backbone.out_type=featmap', "out_type must be 'avg_featmap' or 'cls_token'"),
    (
        'model.neck.type=GlobalAveragePooling',
        "neck must be None for model.backbone.out_type='avg_featmap', .* got GlobalAveragePoo",
    ),
    ('model.head.in_channels=33', 'head.in_channels must be 16, the width of the backbone'),
    ('model.head.num_classes=3', 'head.num_classes must be at least 10, .* got 3'),
    ('model.backbone.drop_rate=2', 'drop_rate must be a finite number, 0 to 1, got 2'),
    ('optim_wrapper.type=Nope', 'Nope is not in the mmpretrain::optimizer_wrapper registry'),
    (
        'optim_wrapper.optimizer.lrr=1',
        "optimizer has no 'lrr'; did you mean lr. it may have amsgrad",
    ),
    (
        'optim_wrapper.optimizer.nesterov=True',
        "has no 'nesterov'; it may have .*; one that a base gave goes with _delete_=True",
    ),
    (
        'optim_wrapper.paramwise_cfg.norm_decay_mul=0',
        "paramwise_cfg has no 'norm_decay_mul'; did you mean norm_decay_mult",
    ),
    (
        'optim_wrapper.paramwise_cfg.custom_keys.pos_bias.decay_mul=0',
        "custom_keys 'pos_bias' has 'decay_mul'; did you mean decay_mult",
    ),
    ('env_cfg.mp_cfg.opencv_num_thread=0', "mp_cfg has no 'opencv_num_thread'; did you mean open"),
    ('model.backbone.init_cfg.type=Nope', 'Nope is not in the .*weight initializer registry'),
    ('auto_scale_lr.base_batchsize=8', "auto_scale_lr has no 'base_batchsize'; did you mean base_"),
    (
        'env_cfg.cudnn_benchmrk=True',
        "env_cfg has no 'cudnn_benchmrk'; did you mean cudnn_benchmark",
    ),
    (
        'model.backbone.type=AFTViT',
        "type AFTViT is not in the mmpretrain::model registry; did you mean 'aft_mm.AFTViT'",
    ),
]


@pytest.mark.parametrize('option, message', SETTINGS, ids=[option for option, _ in SETTINGS])
def test_settings_of_a_run(tool, option, message):
    fails(lambda: tool('train', TINY, '--cfg-options', option), message)


def test_an_option_that_the_config_has_read_before_is_refused_and_named(tool, tmp_path):
    (tmp_path / 'helped.py').write_text(
        f'_base_ = {str(TINY)!r}\nfolder = "here"\n'
        'vis_backends = [dict(type="LocalVisBackend"), dict(type="TensorboardVisBackend")]\n'
        'visualizer = dict(vis_backends=vis_backends)\n'
    )
    for option, places in [
        ('vis_backends.0.type', 'visualizer.vis_backends.0.type'),
        ('folder', 'the config'),
    ]:
        fails(
            lambda option=option: tool('train', 'helped.py', '--cfg-options', f'{option}=x'),
            f'--cfg-options {option} has no effect, .* change {places} instead',
        )


CONFIGS = {
    'raise RuntimeError("x")': r'cannot be read \(RuntimeError: x\)',
    'model = (': 'cannot be read',
    "custom_imports = dict(imports=['no_such_module'])": 'imports a missing module: .*no_such_modul',
    "_base_ = './no.py'": 'cannot be read',
    'optim_wraper = dict()': "'optim_wraper' of the config .* did you mean 'optim_wrapper'",
    'train_dataloder = dict()': "did you mean 'train_dataloader'",
    'custom_hook = []': "did you mean 'custom_hooks'",
    'modle = dict()': "did you mean 'model'",
    'load_form = None': "did you mean 'load_from'",
}


@pytest.mark.parametrize('text', CONFIGS)
def test_configs_that_cannot_be_used(tool, tmp_path, text):
    (tmp_path / 'a.py').write_text(text)
    fails(lambda: tool('train', 'a.py'), CONFIGS[text])
    fails(lambda: tool('analysis_tools/print_config', 'a.py'), CONFIGS[text])


def test_a_config_that_is_its_own_base(tmp_path):
    (tmp_path / 'a.py').write_text("_base_ = './a.py'")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 120)  # a level costs a file that is parsed
    try:
        refuses_input('has itself among its _base_', read_config, str(tmp_path / 'a.py'))
    finally:
        sys.setrecursionlimit(limit)


def test_no_config_of_ours_is_called_misspelt():
    for path in sorted(configs_by_name().values())[::14]:
        config = Config.fromfile(path, import_custom_modules=False)
        check_keys(config)
        if config.default_scope not in ('mmdet', 'mmseg'):  # whose optimizers may be missing
            check_settings(config)


def test_a_broken_mmpretrain_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmpretrain', None)
    config = Config.fromfile(find_config('aft-conv-quickstart_1xb64-50e_digits'))
    refuses_input('^mmpretrain cannot be imported: import of mmpretrain', check_settings, config)


def test_a_name_of_ones_own_is_nobody_elses_affair():
    check_keys(Config(dict(width=8, num_classes=3, crop=dict(), model=dict())))
    # mmdet's configs with group normalisation and weight standardisation, whose conv_cfg is used.
    conv_cfg = dict(type='ConvWS')
    check_keys(Config(dict(conv_cfg=conv_cfg, model=dict(backbone=dict(conv_cfg=conv_cfg)))))
    with pytest.raises(UserError, match="did you mean 'env_cfg'"):
        check_keys(Config(dict(conv_cfg=conv_cfg, model=dict())))
    refuses_input("did you mean 'val_evaluator'", check_keys, Config(dict(val_evaluater=dict())))


@pytest.mark.parametrize('words', ['train_cfg.max_epochs', '=3', 'a=1 b'])
def test_options_that_are_no_pairs(tool, capsys, words):
    with pytest.raises(SystemExit):
        tool('train', TINY, '--cfg-options', *words.split())
    line = capsys.readouterr().err.splitlines()[-1]
    assert '--cfg-options needs KEY=VALUE, got' in line
    with pytest.raises(SystemExit):
        tool('train', TINY, '--cfg-options', 'model.head.topk=[1,5')
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("--cfg-options needs balanced brackets, got 'model.head.topk=[1,5'")


@pytest.fixture
def bias_checkpoint(tmp_path):
    config = Config.fromfile(TINY, import_custom_modules=False)
    config.pop('custom_imports')
    config.dump(tmp_path / 'config.py')
    torch.save(dict(state_dict={}, meta={}), tmp_path / 'a.pth')
    return ['config.py', 'a.pth']


@pytest.mark.parametrize(
    'words, message',
    [
        ('--out folder.png', '--out .*folder.png. cannot be written: Is a directory'),
        ('--out a.xyz', r"--out must end in \.png or .*, got 'a.xyz'"),
        ('--out /proc/a.png', "--out '/proc/a.png' cannot be written"),
        ('--out a.png --dpi 0', '--dpi must be an int, 1 to 2400, got 0'),
        ('--out a.png --top 0', '--top must be an int, 1 or larger, got 0'),
    ],
)
def test_outputs_of_a_picture(tool, tmp_path, bias_checkpoint, words, message):
    (tmp_path / 'folder.png').mkdir()
    words = shlex.split(words)
    fails(lambda: tool('plot bias', *bias_checkpoint, *words), message)
    if '--top' not in words:
        fails(lambda: tool('plot curves', 'no.json', *words), message)


@pytest.mark.parametrize(
    'command, message',
    [
        ('test a.pth --out /proc/x.json', "--out '/proc/x.json' cannot be written"),
        ('test a.pth --out a.txt', r'--out must end in \.json'),
        ('test a.pth --dump /proc/x.pkl', "--dump '/proc/x.pkl' cannot be written"),
        ('complexity --shape 0 0', 'HEIGHT of --shape must be an int, 1 or larger, got 0'),
        ('complexity --shape 5 -1', 'WIDTH of --shape must be an int, 1 or larger, got -1'),
        ('complexity --json a.txt', r'--json must end in \.json'),
        ('complexity --json /proc/a.json', "--json '/proc/a.json' cannot be written"),
    ],
)
def test_arguments_of_a_test_and_of_the_complexity(tool, bias_checkpoint, command, message):
    name, *words = command.split()
    fails(lambda: tool(name, 'config.py', *words), message)


def test_a_classifier_draws_nothing(tool, bias_checkpoint):
    message = r'config.py has no autoregressive model \(one with a decoder\)'
    fails(lambda: tool('sample', *bias_checkpoint, '--out', 'a.png'), message)
    fails(lambda: tool('super_resolve', *bias_checkpoint, 'a.png', 'b.png'), message)


@pytest.mark.parametrize(
    'script, words',
    [
        ('dist_train', []),
        ('dist_test', ['a.py', 'a.pth']),
        ('slurm_train', ['partition', 'job']),
        ('slurm_test', ['partition', 'job', 'a.py']),
        ('dist_train', ['a.py', 'two']),
        ('slurm_train', ['partition', 'job', 'a.py']),
        pytest.param('dist_test', ['a.py', 'a.pth', '0'], marks=pytest.mark.nightly),
    ],
)
def test_launch_scripts_without_their_arguments(script, words):
    done = subprocess.run(
        ['bash', ROOT / f'tools/{script}.sh', *words],
        capture_output=True,
        text=True,
        env={**os.environ, 'PYTHON': sys.executable, 'GPUS': 'x'},
    )
    assert done.returncode in (1, 2)
    (line,) = done.stderr.splitlines()
    assert re.match(
        rf'Error: (needs its arguments: bash tools/{script}.sh [A-Z_ ]+|GPUS (and [A-Z_]+ )?must)',
        line,
    )
