"""Arguments of train.py and test.py, and errors for bad input."""

import itertools
import json
import logging
import os
import pickle
import re
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import PARAM_SCHEDULERS
from mmengine.runner import IterBasedTrainLoop

from aft_mm.analysis.run_logs import read_scalars
from aft_mm.checkpoint import load_from_local
from aft_mm.config.reading import check_settings
from aft_mm.config.texts import type_name
from aft_mm.engine import SafeCheckpointHook
from aft_mm.engine.preflight import (
    check_num_classes,
    check_same_classes,
    check_schedule,
    shortened_warmup,
)
from aft_mm.errors import UserError
from aft_mm.registry import register_safe_loading

from .errors import refuses, refuses_input, stops
from .helpers import only_error

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_data(monkeypatch):
    monkeypatch.delenv('AFT_MM_DATA', raising=False)


@pytest.fixture(scope='module')
def trained(run, root, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    words = (
        '--work-dir here --no-validate --auto-scale-lr --amp --cfg-options param_scheduler=None '
        'train_dataloader.num_workers=0 train_dataloader.persistent_workers=True --local-rank 0'
    )
    result = run(root / 'tools/train.py', config('tiny_compiled'), *words.split(), cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout + result.stderr


def test_training_follows_its_arguments(trained):
    folder, log = trained
    assert (folder / 'here/epoch_1.pth').exists()
    assert 'epoch 1, ' in log and ', validation' not in log
    assert read_scalars(folder / 'here')[0]['lr'] == pytest.approx(3e-3 * 16 / 32)
    cfg = Config.fromfile(folder / 'here/tiny_compiled.py', import_custom_modules=False)
    assert cfg.optim_wrapper.type == 'aft_mm.AutocastOptimWrapper'
    assert cfg.train_dataloader.num_workers == 0
    assert cfg.train_dataloader.persistent_workers is False  # torch refuses it without workers
    checkpoint = torch.load(folder / 'here/epoch_1.pth', weights_only=False)
    assert checkpoint['message_hub']['runtime_info']['command'] == (
        'aft_mm train tiny_compiled --no-validate --auto-scale-lr --amp --cfg-options '
        'param_scheduler=None train_dataloader.num_workers=0 '
        'train_dataloader.persistent_workers=True'
    )


def test_testing_follows_its_arguments(trained, run, root, config):
    folder, scores = trained[0], {}
    # The work dir of a training keeps its config.
    cases = dict(plain=[], tta=['--tta', '--amp', '--work-dir', 'tta'])
    logs = dict(plain='work_dirs/tiny_compiled/test', tta='tta')
    for name, words in cases.items():
        files = f'here/epoch_1.pth --out {name}.json --dump out/{name}.pkl'
        command = root / 'tools/test.py', config('tiny_compiled'), *files.split(), *words
        result = run(*command, cwd=folder)
        assert result.returncode == 0, result.stderr
        samples = pickle.loads((folder / f'out/{name}.pkl').read_bytes())
        assert len(samples) == 65
        right = [sample['pred_score'].argmax() == sample['gt_label'] for sample in samples]
        metrics = json.loads((folder / f'{name}.json').read_text())
        assert metrics['accuracy/top1'] == pytest.approx(100 * np.mean(right))
        assert list((folder / logs[name]).glob('*/*.log'))
        scores[name] = torch.stack([sample['pred_score'] for sample in samples])
    assert not torch.equal(scores['plain'], scores['tta'])


@pytest.mark.parametrize(
    ('words', 'resume', 'load_from'),
    [
        ([], False, None),
        (['--resume'], True, None),
        (['--resume', 'auto'], 'auto', None),
        (['--resume', 'a.pth'], True, 'a.pth'),
    ],
)
def test_resume_and_load_from(tool, config, words, resume, load_from):
    train = tool('train')
    cfg = Config(dict(load_from=None))
    train.apply_args(cfg, train.parse_args([config('tiny'), *words]))
    assert (cfg.get('resume', False), cfg.load_from) == (resume, load_from)


@pytest.mark.parametrize('launcher', ['none', 'pytorch', 'slurm', 'mpi'])
def test_launcher_needs_its_environment(tool, config, monkeypatch, launcher):
    for name in ('RANK', 'LOCAL_RANK', 'SLURM_PROCID', 'OMPI_COMM_WORLD_RANK'):
        monkeypatch.setenv(name, '0')  # what the test leaves is then removed
        monkeypatch.delenv(name)
    train = tool('train')
    args = train.parse_args([config('tiny'), '--launcher', launcher])
    if launcher == 'none':
        assert train.load_run_config(args).launcher == 'none'
        assert 'LOCAL_RANK' not in os.environ
    else:
        refuses(f"launcher='{launcher}' needs .*(RANK|PROCID), which", train.load_run_config, args)


def test_the_first_of_several_best_metrics_is_in_the_summary(run, root, config, tmp_path):
    (tmp_path / 'text.txt').write_bytes(np.random.default_rng(0).bytes(4000))
    options = 'default_hooks.checkpoint.save_best=[perplexity_per_char,bits_per_char]'
    words = '--work-dir', 'work', '--cfg-options', options, 'train_cfg.max_epochs=1'
    result = run(root / 'tools/train.py', config('tiny_text'), *words, cwd=tmp_path)
    best = 'best       perplexity_per_char .* at epoch 1\n'
    name = 'work/best_perplexity_per_char_epoch_1.pth'
    assert re.search(f'{best}checkpoint {name}\n', result.stdout), result.stdout + result.stderr
    assert (tmp_path / name).exists()


def test_changes_when_a_checkpoint_is_loaded(run, root, config, tmp_path):
    """A resumed run uses its old rate and the new clip_grad; load_from uses the new rate."""
    (tmp_path / 'text.txt').write_bytes(np.random.default_rng(0).bytes(4000))

    def train(work_dir, epochs, *words):
        words = '--no-validate', '--work-dir', work_dir, *words, f'train_cfg.max_epochs={epochs}'
        words += 'default_hooks.checkpoint.save_best=None', 'custom_hooks=[]'
        result = run(root / 'tools/train.py', config('tiny_text'), *words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        register_safe_loading()
        state = load_from_local(str(tmp_path / work_dir / f'epoch_{epochs}.pth'))
        momentum = [moments['exp_avg'] for moments in state['optimizer']['state'].values()]
        return momentum, [record['lr'] for record in read_scalars(tmp_path / work_dir)]

    resume = ('--resume', 'first/epoch_1.pth', '--cfg-options', 'optim_wrapper.optimizer.lr=1')
    first, _ = train('first', 1, '--cfg-options')
    plain, rates = train('plain', 2, *resume)
    clipped, _ = train('clipped', 2, *resume, 'optim_wrapper.clip_grad.max_norm=1e-9')
    _, new_rates = train(
        'new', 1, '--cfg-options', 'load_from=first/epoch_1.pth', 'optim_wrapper.optimizer.lr=1e-4'
    )
    assert 0 < max(rates) < 3e-3
    faded = [moment * 0.9**6 for moment in first]  # six steps without a gradient
    torch.testing.assert_close(clipped, faded, rtol=1e-5, atol=1e-9)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(plain, faded, rtol=1e-2, atol=1e-6)
    assert max(new_rates) == pytest.approx(1e-4, rel=0.1)


def test_an_unsupported_backend_has_a_one_line_message(run, root, config, tmp_path):
    result = run(
        root / 'tools/train.py', config('tiny'), cwd=tmp_path, env=dict(AFT_MM_BACKEND='triton')
    )
    assert 'no AFT backend runs aft_conv on cpu: triton: runs on cuda' in only_error(result)


BEFORE = {
    'train TINY_images': "Error: train_dataloader.dataset reads 'data/pictures', which is empty; "
    'put the data there',
    'train TINY --cfg-options val_dataloader.dataset.type=ImageNet '
    'val_dataloader.dataset.data_root=data val_dataloader.dataset.split=val': 'Error: '
    "val_dataloader.dataset reads 'data/val', which does not exist",
    'train TINY_text': "Error: train_dataloader.dataset reads 'text.txt', which does not exist; "
    'put the data there$',
    'test TINY_text a.pth --tta': 'Error: --tta without tta_model is for classifiers, detectors and '
    'segmentors, got .*tiny_text.py',
    'test TINY a.pth --dump a.txt': "Error: --dump must end in .pkl, got 'a.txt'",
    'test TINY a.pth --amp --cfg-options test_cfg=None': 'Error: testing needs test_cfg, which may '
    'be empty, in .*tiny.py',
    'train TINY --work-dir . --cfg-options load_from=a.pth': "Error: load_from 'a.pth' must be outside "
    'the work dir of the new run, .* --work-dir',
    'train TINY --auto-scale-lr --cfg-options auto_scale_lr=None': 'Error: --auto-scale-lr needs '
    'auto_scale_lr.base_batch_size in .*tiny.py',
}


class TestErrorsBeforeARun:
    @pytest.fixture
    def fails(self, tool, config, here):

        def call(words, match):
            name, *words = words.replace('TINY', config('tiny').removesuffix('.py')).split()
            words = [f'{word}.py' if '/tests/configs/tiny' in word else word for word in words]
            stops(match, tool(name).main, words)
            assert not (here / 'work_dirs').exists()

        return call

    @pytest.mark.parametrize('words', BEFORE)
    def test_a_line_says_what_is_wrong(self, fails, words, tmp_path):
        (tmp_path / 'data/pictures').mkdir(parents=True)
        (tmp_path / 'data/train/a').mkdir(parents=True)
        (tmp_path / 'a.pth').touch()
        fails(words, BEFORE[words])

    def test_what_depends_on_the_environment(self, fails, monkeypatch):
        monkeypatch.setenv('AFT_MM_DATA', 'elsewhere')
        message = "train_dataloader.dataset reads 'elsewhere/pictures', which does not exist; .* "
        fails('train TINY_images', f"Error: {message}AFT_MM_DATA \\(now 'elsewhere'\\)")
        monkeypatch.setenv('AFT_MM_BACKEND', 'Triton')
        for words in ('train no.py', 'test no.py a.pth'):
            fails(words, 'Error: AFT_MM_BACKEND must be names of cuda, triton, native, eager')

    @pytest.mark.parametrize('library', ['mmdet', 'mmsegmentation'])
    def test_missing_library_that_a_config_inherits(self, fails, tmp_path, monkeypatch, library):
        monkeypatch.setattr('mmengine.config.config.is_installed', lambda name: False)
        scope = library.removesuffix('mentation')
        (tmp_path / 'a.py').write_text(f"_base_ = '{scope}::_base_/default_runtime.py'\n")
        missing = f"'a.py' needs mmdet and mmseg \\({library} is not installed, .*\\)"
        for words in ('train a.py', 'test a.py a.pth', 'complexity a.py'):
            fails(words, f'Error: config {missing}: make downstream')

    def test_missing_library_of_the_scope(self, fails, tmp_path, monkeypatch):
        monkeypatch.delitem(sys.modules, 'mmdet.models', raising=False)
        monkeypatch.setitem(sys.modules, 'mmdet', None)
        (tmp_path / 'a.py').write_text("default_scope = 'mmdet'\n")
        fails('train a.py', 'Error: config .* needs mmdet and mmseg .*: make downstream')

    def test_torchvision_of_another_torch(self, run, root, config, tmp_path):
        package = tmp_path / 'torchvision'
        package.mkdir()
        (package / '__init__.py').write_text(
            "raise RuntimeError('operator torchvision::nms does not exist')"
        )
        (tmp_path / 'a.pth').touch()
        words = root / 'tools/test.py', config('tiny'), 'a.pth'
        result = run(*words, cwd=tmp_path, env={'PYTHONPATH': str(tmp_path)}, fresh=True)
        assert f'torch {torch.__version__} and torchvision' in only_error(result)


class TestErrorsOfARun:
    @pytest.fixture
    def train_with(self, tool, config, here):
        Path('text.txt').write_bytes(np.random.default_rng(0).bytes(4000))

        def call(match, edit):
            cfg = Config.fromfile(config('tiny_text'))
            edit(cfg)
            name = f'{time.monotonic_ns()}.py'  # mmengine needs unique names of runs
            cfg.dump(name)
            stops(match, tool('train').main, [name])

        return call

    @pytest.mark.parametrize(
        ('options', 'message'),
        [
            ('', 'Found 0 files in subfolders of: '),
            (
                'train_dataloader.dataset.type=CIFAR10 train_dataloader.dataset.download=False',
                'Cannot find CIFAR10 dataset in data/pictures',
            ),
            ('model.backbone.token_mixer.kernel=3', "AFTConv.*'kernel'"),
        ],
    )
    def test_data_and_mixers_that_cannot_be_built(
        self, run, root, config, tmp_path, options, message
    ):
        (tmp_path / 'data/pictures/a').mkdir(parents=True)
        words = f'--no-validate --cfg-options train_cfg.max_epochs=1 {options}'.split()
        result = run(root / 'tools/train.py', config('tiny_images'), *words, cwd=tmp_path)
        assert re.search(message, only_error(result))

    @pytest.mark.parametrize(
        ('schedule', 'message'),
        [
            (
                dict(type='aft_mm.InverseSqrtLR', begin=40, by_epoch=False),
                'at iteration 40 and ends at iteration 18, ',
            ),
            (
                dict(type='CosineAnnealingLR', T_max=9, begin=3, convert_to_iter_based=True),
                'at epoch 3 and ends at epoch 3, ',
            ),
            (dict(type='ConstantLR', begin=2, end=1), 'at epoch 2 and ends at epoch 1, '),
        ],
    )
    def test_schedule_longer_than_the_run(self, train_with, schedule, message):
        match = f'^Error: {type_name(schedule["type"])} of param_scheduler begins {message}.*param_scheduler=None$'
        for settings in ([schedule], schedule):
            train_with(match, lambda cfg, new=settings: setattr(cfg, 'param_scheduler', new))

    @pytest.mark.parametrize(
        ('type_', 'is_said'), [('CosineAnnealingLR', True), ('LinearLR', False)]
    )
    @pytest.mark.parametrize('end', [2, 3, 4])
    def test_schedule_of_another_length_than_the_run(self, type_, is_said, end, caplog):
        schedule = dict(type=type_, begin=0, end=end)
        logger = logging.getLogger('schedules')
        runner = SimpleNamespace(
            param_schedulers=schedule, max_iters=18, max_epochs=3, logger=logger, train_loop=None
        )
        check_schedule(Config(), runner)
        said = f'CosineAnnealingLR of param_scheduler ends at epoch {end}, but the run at 3; '
        assert (said in caplog.text) == (is_said and end != 3) == bool(caplog.text)

    def test_schedule_by_epoch_of_a_run_by_iterations(self, train_with):
        def by_iterations(cfg):
            cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=6)
            cfg.param_scheduler = [dict(type='MultiStepLR', milestones=[1, 3])]

        message = '^Error: MultiStepLR of param_scheduler must have by_epoch=False, .*iterations$'
        train_with(message, by_iterations)

    def test_checkpoints_after_epochs_of_a_run_by_iterations(self, train_with):
        def by_iterations(cfg):
            cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=6)
            cfg.param_scheduler = None

        message = '^Error: the checkpoint hook must have by_epoch=False, .*iterations$'
        train_with(message, by_iterations)

    @pytest.mark.parametrize(
        'schedules',
        [
            dict(
                gen=dict(type='LinearLR', by_epoch=False, end=9),
                disc=[dict(type='ConstantLR', by_epoch=False, end=9)],
            ),
            dict(type='ReduceOnPlateauLR', monitor='loss'),
        ],
    )
    def test_schedules_of_several_optimizers_and_after_validations(self, schedules):
        loop = IterBasedTrainLoop.__new__(IterBasedTrainLoop)
        runner = SimpleNamespace(param_schedulers=schedules, max_iters=18, max_epochs=1)
        runner.train_loop, runner.logger = loop, logging.getLogger('schedules')
        check_schedule(Config(), runner)

    def test_topk_of_more_than_the_classes(self, tool, config, here):
        words = '--cfg-options', 'val_evaluator.topk=(1, 11)', f'experiment_name={here.name}'
        message = 'topk of Accuracy in val_evaluator must be at most 10, .*, got 11'
        stops(message, tool('train').main, [config('tiny'), *words])
        assert not list(here.rglob('*.pth'))

    def test_metric_of_another_task(self, train_with, here):
        def classify(cfg):
            cfg.val_evaluator = dict(type='mmpretrain.Accuracy')

        message = 'val_evaluator must have metrics of samples with length, nats, .*, got Accuracy, which needs'
        train_with(message, classify)
        assert not list(here.rglob('*.pth'))

    @pytest.mark.parametrize('name', ['CustomDataset', 'mmseg.BaseSegDataset'])
    def test_images_without_a_pipeline(self, name):
        cfg = Config(dict(train_dataloader=dict(dataset=dict(type=name))))
        refuses_input('train_dataloader.dataset.pipeline must have a step', check_settings, cfg)

    def test_a_warm_up_longer_than_the_run_is_shortened(self):
        warm = dict(type='LinearLR', begin=0, end=3, convert_to_iter_based=True)
        cosine = dict(type='CosineAnnealingLR', eta_min=0, begin=3, convert_to_iter_based=True)
        assert shortened_warmup([warm, cosine], 40, 1) == [
            dict(type='LinearLR', by_epoch=False, begin=0, end=4),
            dict(type='CosineAnnealingLR', by_epoch=False, eta_min=0, begin=4, end=40),
        ]
        assert shortened_warmup([warm, cosine], 160, 4) is None
        assert shortened_warmup([{**warm, 'end': 2}, cosine], 40, 1) is None
        assert shortened_warmup([warm, cosine], 1, 1) is None
        steps = dict(type='MultiStepLR', by_epoch=True, begin=cosine['begin'], milestones=[30, 60])
        assert shortened_warmup([warm, steps], 40, 1) is None  # 30 iterations are no 30 epochs

    @pytest.mark.parametrize('iterations', [2, 3, 6, 19, 20, 33])
    def test_a_shortened_warm_up_reaches_the_rate(self, iterations):
        warm = dict(type='LinearLR', start_factor=1e-3, begin=0, end=99, by_epoch=False)
        cosine = dict(type='CosineAnnealingLR', begin=99, by_epoch=False)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        parts = shortened_warmup([warm, cosine], iterations, 1)
        schedules = [
            PARAM_SCHEDULERS.build(
                dict(part, optimizer=optimizer), default_args=dict(verbose=False)
            )
            for part in parts
        ]
        rates = []
        for _ in range(iterations):
            rates.append(optimizer.param_groups[0]['lr'])
            optimizer.step()
            for schedule in schedules:
                schedule.step()
        assert max(rates) == pytest.approx(0.5)
        assert (rates[0] < 0.01) == (iterations >= 20)

    @pytest.mark.parametrize(
        ('size', 'message'),
        [
            *((size, 'must be an int') for size in (0, -3, 2.5, 'many')),
            (9999, r'must be small enough for one batch of the \d+ samples .* got 9999$'),
        ],
    )
    def test_invalid_batch_size(self, train_with, size, message):
        train_with(
            f'^Error: train_dataloader.batch_size {message}',
            lambda cfg: cfg.train_dataloader.update(batch_size=size, drop_last=True),
        )

    @pytest.mark.parametrize(
        ('argument', 'message'),
        [
            (dict(max_keep_ckpt=1), "hook has no argument 'max_keep_ckpt'; .* 'max_keep_ckpts'"),
            (dict(save_best='accuracy'), r"hook must be .* \(bits_per_char, .*\), got 'accuracy'"),
        ],
    )
    def test_arguments_of_the_checkpoint_hook(self, train_with, argument, message):
        train_with(
            f'^Error: .*checkpoint {message}',
            lambda cfg: cfg.default_hooks.checkpoint.update(argument),
        )
        assert bool([*Path('work_dirs').glob('*/epoch_1.pth')]) == ('save_best' in argument)

    @pytest.mark.parametrize(
        ('metrics', 'message'),
        [
            ({'my/hamming': 0.5}, "auto' of the checkpoint hook must find .*, got 'my/hamming'"),
            ({'my/classes': [1.0, 2.0]}, "must be a metric with one value, got 'my/classes' with"),
            ({'acc': np.zeros(2)}, "must be a metric with one value, got 'acc' with"),
            ({'acc': torch.zeros(2)}, "must be a metric with one value, got 'acc' with"),
            ({'my/confidence': torch.ones(1)}, 'whose better values are known'),
        ],
    )
    def test_a_first_metric_that_cannot_select_is_named(self, metrics, message):
        hook = SafeCheckpointHook(save_best='auto')
        with pytest.raises(UserError, match=message):
            hook._save_best_checkpoint(None, metrics)

    def test_classes_of_joined_data_sets(self):
        parts = [SimpleNamespace(metainfo=dict(classes=('a',) * n)) for n in (3, 4)]
        infos = [part.metainfo for part in parts]
        for metainfo, number in itertools.product((infos[0], infos), (3, 4)):
            joined = SimpleNamespace(metainfo=metainfo, datasets=parts)
            model = torch.nn.Module()
            model.head = torch.nn.Module()
            model.head.num_classes = number
            message = 'must be at least 4, .* got 3'
            with pytest.raises(UserError, match=message) if number < 4 else nullcontext():
                check_num_classes(model, joined, 'training')
            check_same_classes(joined, parts[0])
            with pytest.raises(UserError, match='3 classes and the validation set 4'):
                check_same_classes(joined, parts[1])

    def test_checkpoint_of_another_architecture(self, trained, run, root, config):
        folder, _ = trained
        options = '--work-dir other --cfg-options model.backbone.arch.embed_dims=32'
        options = *options.split(), 'model.head.in_channels=32'
        for words in (
            [root / 'tools/test.py', config('tiny'), 'here/epoch_1.pth', *options],
            [root / 'tools/train.py', config('tiny'), *options, '--resume', 'here/epoch_1.pth'],
        ):
            line = only_error(run(*words, cwd=folder))
            assert 'D=32' in line and 'another shape' in line
        assert 'Epoch(' not in ''.join(path.read_text() for path in folder.glob('other/*/*.log'))


@pytest.mark.parametrize(('tool', 'files'), [('train', ['a.py']), ('test', ['a.py', 'a.pth'])])
def test_slurm_scripts_pass_the_variables(run, root, tmp_path, tool, files):
    (tmp_path / 'srun').write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / 'srun').chmod(0o755)
    variables = {'PATH': f'{tmp_path}:/usr/bin:/bin', 'GPUS': '16', 'GPUS_PER_NODE': '4'}
    script = root / f'tools/slurm_{tool}.sh'
    result = run('bash', script, 'gpu', 'job', *files, '--amp', cwd=tmp_path, env=variables)
    expected = '--partition=gpu --job-name=job --gres=gpu:4 --ntasks=16 --ntasks-per-node=4 '
    expected += f'--cpus-per-task=5 --kill-on-bad-exit=1 {sys.executable} -u {root}/tools/{tool}.py'
    assert result.stdout.split() == [*expected.split(), *files, '--launcher', 'slurm', '--amp']
