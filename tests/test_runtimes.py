"""Hooks of every training, whichever runtime its config inherits."""

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import CheckpointHook

from aft_mm.engine import SafeCheckpointHook, apply_safe_defaults, runner
from aft_mm.engine.hooks.training import CompileHook

from .all_configs import configs_of, load_config

TASKS = (
    'image_classification image_ar language_modeling machine_translation point_cloud '
    'super_resolution speech_recognition copy_task synthetic_tasks detection segmentation'
).split()
FINITE = 'aft_mm.FiniteLossHook'
EXACT = 'aft_mm.ExactResumeHook'


def hooks(cfg):
    return [
        hook['type'] for hook in (*cfg.default_hooks.values(), *cfg.get('custom_hooks', [])) if hook
    ]


@pytest.mark.parametrize('task', TASKS)
def test_every_config_writes_whole_checkpoints_logs_and_stops_at_nan(task, missing_downstream):
    if task in ('detection', 'segmentation') and missing_downstream:
        pytest.skip(f'{task} inherits mmdet or mmseg, which `make downstream` installs')
    found = {name: load_config(path) for name, path in configs_of(task).items()}
    trained = {name: cfg for name, cfg in found.items() if cfg.get('train_cfg')}
    assert trained
    for name, cfg in trained.items():
        assert cfg.default_hooks.checkpoint.type == 'aft_mm.SafeCheckpointHook', name
        if task != 'segmentation':  # mmseg's schedules set it
            assert cfg.default_hooks.checkpoint.save_best == 'auto', name
            assert cfg.default_hooks.checkpoint.max_keep_ckpts == 3, name
        assert hooks(cfg).count(FINITE) == hooks(cfg).count(EXACT) == 1, name
        backends = {backend.type for backend in cfg.visualizer.vis_backends}
        assert backends == {'LocalVisBackend', 'TensorboardVisBackend'}, name
        before = cfg.to_dict()
        apply_safe_defaults(cfg := cfg.copy())
        assert cfg.to_dict() == before, name


@pytest.mark.parametrize(
    ('metric', 'rule'),
    [
        ('bits_per_dim', 'less'),
        ('bits_per_subword', 'less'),
        ('phoneme_error_rate', 'less'),
        ('token_accuracy_percent', 'greater'),
        ('accuracy/top1', 'greater'),
        ('perplexity_per_char', 'less'),
        ('percent_correct_tokens', 'greater'),
        ('sampled_psnr_db', 'greater'),
        ('consistency_mse', 'less'),
        ('bleu', 'greater'),
    ],
)
def test_the_first_metric_selects_the_best_checkpoint(metric, rule):
    hook = SafeCheckpointHook(save_best='auto')
    hook._init_rule(hook.rules, [metric])
    assert hook.rules == [rule]


@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(default_hooks=None),
        dict(default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=7))),
        dict(default_hooks=dict(checkpoint=dict(type='mmengine.CheckpointHook', interval=7))),
        dict(default_hooks=dict(checkpoint=dict(type=CheckpointHook, interval=7))),
    ],
)
def test_a_config_of_ones_own_gets_all(options):
    cfg = Config(options)
    for _ in range(2):
        apply_safe_defaults(cfg)
        assert hooks(cfg) == ['aft_mm.SafeCheckpointHook', FINITE, EXACT]
        assert cfg.default_hooks.checkpoint.interval == (7 if options.get('default_hooks') else 1)


def compiles(options):
    cfg = Config(options)
    apply_safe_defaults(cfg)
    return hooks(cfg).count('aft_mm.CompileHook')


def test_training_on_cuda_is_compiled_unless_the_config_says_otherwise(monkeypatch):
    assert not compiles({})
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(runner, 'find_spec', lambda name: name)
    monkeypatch.setattr(runner.shutil, 'which', lambda name: name)
    assert compiles({}) == 1
    for kind in ('aft_mm.CompileHook', CompileHook):
        own = dict(default_hooks=dict(compile=dict(type=kind, module='neck')))
        apply_safe_defaults(cfg := Config(own))
        assert cfg.default_hooks.compile == own['default_hooks']['compile']
    for other in (dict(compile=False), dict(compile=True), dict(default_scope='mmdet')):
        assert not compiles(other)
    monkeypatch.setattr(runner.shutil, 'which', lambda name: None)
    assert not compiles({})


def test_a_hook_that_is_none_stays_out():
    cfg = Config(dict(default_hooks=dict(finite_loss=None)))
    apply_safe_defaults(cfg)
    assert hooks(cfg) == ['aft_mm.SafeCheckpointHook', EXACT]
    assert 'finite_loss' not in cfg.default_hooks


def test_an_own_checkpoint_hook_stays():
    cfg = Config(dict(default_hooks=dict(checkpoint=dict(type='mine.CheckpointHook'))))
    apply_safe_defaults(cfg)
    assert cfg.default_hooks.checkpoint.type == 'mine.CheckpointHook'
