"""Arguments of train.py and test.py, and errors for bad input."""

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

from aft_mm.checkpoint import load_from_local
from aft_mm.engine.preflight import shortened_warmup
from aft_mm.registry import register_safe_loading

from .helpers import only_error


@pytest.fixture(autouse=True)
def own_data(monkeypatch):
    monkeypatch.delenv('AFT_MM_DATA', raising=False)


@pytest.fixture(scope='module')
def trained(run, root, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp('trained')
    result = run(
        root / 'tools/train.py',
        config('tiny_compiled'),
        '--work-dir',
        'here',
        '--no-validate',
        '--auto-scale-lr',
        '--amp',
        '--cfg-options',
        'train_dataloader.num_workers=0',
        'train_dataloader.persistent_workers=True',
        'param_scheduler=None',
        '--local-rank',
        '0',
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    return folder, result.stdout + result.stderr


@pytest.fixture(scope='module')
def tested(trained, run, root, config):
    folder, _ = trained
    results = {}
    for name, words in dict(plain=[], tta=['--tta', '--amp']).items():
        result = run(
            root / 'tools/test.py',
            config('tiny_compiled'),
            'here/epoch_1.pth',
            '--out',
            f'{name}.json',
            '--dump',
            f'out/{name}.pkl',
            '--work-dir',
            name,
            *words,
            cwd=folder,
        )
        assert result.returncode == 0, result.stderr
        with open(folder / f'out/{name}.pkl', 'rb') as file:
            results[name] = pickle.load(file)
    return folder, results


class TestTrainArguments:
    def test_work_dir(self, trained):
        folder, _ = trained
        assert (folder / 'here/epoch_1.pth').exists()

    def test_no_validate(self, trained):
        assert 'Epoch(train)' in trained[1] and 'Epoch(val)' not in trained[1]

    def test_auto_scale_lr(self, trained):
        folder, _ = trained
        scalars = next(folder.glob('here/*/vis_data/scalars.json')).read_text().splitlines()
        assert json.loads(scalars[0])['lr'] == pytest.approx(3e-3 * 16 / 32)

    def test_amp_and_cfg_options(self, trained):
        cfg = Config.fromfile(trained[0] / 'here/tiny_compiled.py', import_custom_modules=False)
        assert cfg.optim_wrapper.type == 'aft_mm.AutocastOptimWrapper'
        assert cfg.train_dataloader.num_workers == 0
        assert cfg.train_dataloader.persistent_workers is False  # torch refuses it without workers

    @pytest.mark.parametrize(
        ('words', 'resume', 'load_from'),
        [
            ([], False, None),
            (['--resume'], True, None),
            (['--resume', 'auto'], 'auto', None),
            (['--resume', 'a.pth'], True, 'a.pth'),
        ],
    )
    def test_resume(self, tool, config, words, resume, load_from):
        train = tool('train')
        cfg = Config(dict(load_from=None))
        train.apply_args(cfg, train.parse_args([config('tiny'), *words]))
        assert (cfg.get('resume', False), cfg.load_from) == (resume, load_from)

    @pytest.mark.parametrize('launcher', ['none', 'pytorch', 'slurm', 'mpi'])
    def test_launcher_needs_its_environment(self, tool, config, monkeypatch, launcher):
        for name in ('RANK', 'SLURM_PROCID', 'OMPI_COMM_WORLD_RANK'):
            monkeypatch.delenv(name, raising=False)
        train = tool('train')
        args = train.parse_args([config('tiny'), '--launcher', launcher])
        if launcher == 'none':
            assert train.load_run_config(args).launcher == 'none'
        else:
            with pytest.raises(ValueError, match=f"launcher='{launcher}' needs .*_?RANK|PROCID"):
                train.load_run_config(args)


class TestTestArguments:
    def test_metrics_of_out_equal_the_dump(self, tested):
        folder, results = tested
        for name, samples in results.items():
            assert len(samples) == 65
            right = [sample['pred_score'].argmax() == sample['gt_label'] for sample in samples]
            metrics = json.loads((folder / f'{name}.json').read_text())
            assert metrics['accuracy/top1'] == pytest.approx(100 * np.mean(right))

    def test_tta_and_amp_change_the_scores(self, tested):
        plain, tta = tested[1].values()
        assert any(
            not torch.equal(a['pred_score'], b['pred_score'])
            for a, b in zip(plain, tta, strict=True)
        )

    def test_work_dir_holds_the_log(self, tested):
        assert list((tested[0] / 'plain').glob('*/*.log'))


def test_likelihood_equals_that_of_the_dump(run, root, config, tmp_path):
    (tmp_path / 'text.txt').write_bytes(np.random.default_rng(0).bytes(4000))
    for words in (
        ['train.py', config('tiny_text'), '--amp', '--no-validate'],
        [
            'test.py',
            config('tiny_text'),
            'work/epoch_1.pth',
            '--out',
            'metrics.json',
            '--dump',
            'dump.pkl',
        ],
    ):
        result = run(
            root / 'tools' / words[0],
            *words[1:],
            '--work-dir',
            'work',
            '--cfg-options',
            'train_cfg.max_epochs=1',
            'default_hooks.checkpoint.save_best=None',
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stderr
    with open(tmp_path / 'dump.pkl', 'rb') as file:
        samples = pickle.load(file)
    nats, number = (sum(sample[key] for sample in samples) for key in ('nats', 'num_dims'))
    metrics = json.loads((tmp_path / 'metrics.json').read_text())
    assert number == 200
    assert metrics['bits_per_char'] == pytest.approx(nats / number / np.log(2))
    assert metrics['perplexity_per_char'] == pytest.approx(np.exp(nats / number))


@pytest.mark.slow
def test_changes_when_a_checkpoint_is_loaded(run, root, config, tmp_path):
    """A resumed run uses its old rate and the new clip_grad; load_from uses the new rate."""
    (tmp_path / 'text.txt').write_bytes(np.random.default_rng(0).bytes(4000))

    def train(work_dir, epochs, *words):
        result = run(
            root / 'tools/train.py',
            config('tiny_text'),
            '--work-dir',
            work_dir,
            '--no-validate',
            *words,
            f'train_cfg.max_epochs={epochs}',
            'default_hooks.checkpoint.save_best=None',
            'custom_hooks=[]',
            cwd=tmp_path,
        )
        assert result.returncode == 0, result.stderr
        (log,) = tmp_path.glob(f'{work_dir}/*/vis_data/scalars.json')
        register_safe_loading()
        state = load_from_local(str(tmp_path / work_dir / f'epoch_{epochs}.pth'))
        momentum = [moments['exp_avg'] for moments in state['optimizer']['state'].values()]
        return momentum, [json.loads(line)['lr'] for line in log.read_text().splitlines()]

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


class TestErrorsBeforeARun:
    @pytest.fixture
    def fails(self, tool, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

        def call(name, *words, match):
            with pytest.raises(SystemExit, match=match) as error:
                tool(name).main([str(word) for word in words])
            assert str(error.value).count('\n') == 0
            assert not (tmp_path / 'work_dirs').exists()

        return call

    @pytest.mark.parametrize('words', [['train', 'no.py'], ['test', 'no.py', 'a.pth']])
    def test_missing_config(self, fails, words):
        fails(*words, match="Error: config 'no.py' does not exist")

    @pytest.mark.parametrize('words', [['train', 'no.py'], ['test', 'no.py', 'a.pth']])
    def test_unknown_backend(self, fails, words, monkeypatch):
        monkeypatch.setenv('AFT_MM_BACKEND', 'Triton')
        fails(*words, match='Error: AFT_MM_BACKEND must be names of triton, native, eager')

    @pytest.mark.parametrize('library', ['mmdet', 'mmsegmentation'])
    def test_missing_library_that_a_config_inherits(self, fails, tmp_path, monkeypatch, library):
        monkeypatch.setattr('mmengine.config.config.is_installed', lambda name: False)
        scope = library.removesuffix('mentation')
        (tmp_path / 'a.py').write_text(f"_base_ = '{scope}::_base_/default_runtime.py'\n")
        match = (
            "Error: config 'a.py' needs mmdet and mmseg "
            f'\\({library} is not installed, .*\\): make downstream'
        )
        fails('train', 'a.py', match=match)
        fails('test', 'a.py', 'a.pth', match=match)

    def test_missing_library_of_the_scope(self, fails, tmp_path, monkeypatch):
        monkeypatch.delitem(sys.modules, 'mmdet.models', raising=False)
        monkeypatch.setitem(sys.modules, 'mmdet', None)
        (tmp_path / 'a.py').write_text("default_scope = 'mmdet'\n")
        fails(
            'train',
            'a.py',
            match='Error: config .* needs mmdet and mmseg .*: make downstream',
        )

    def test_missing_checkpoint(self, fails, config):
        match = "Error: checkpoint 'no.pth' does not exist"
        fails('test', config('tiny'), 'no.pth', match=match)
        fails('train', config('tiny'), '--resume', 'no.pth', match=match)

    def test_missing_data(self, fails, config, monkeypatch):
        monkeypatch.setenv('AFT_MM_DATA', 'elsewhere')
        fails(
            'train',
            config('tiny_images'),
            match='Error: train_dataloader.dataset reads '
            "'elsewhere/pictures', which does not exist; .* AFT_MM_DATA \\(now 'elsewhere'\\)",
        )

    def test_empty_folder(self, fails, config, tmp_path):
        (tmp_path / 'data/pictures').mkdir(parents=True)
        fails(
            'train',
            config('tiny_images'),
            match='Error: train_dataloader.dataset reads '
            "'data/pictures', which is empty; put the data there",
        )

    def test_missing_split_of_imagenet(self, fails, config, tmp_path):
        (tmp_path / 'data/train/a').mkdir(parents=True)
        fails(
            'train',
            config('tiny'),
            '--cfg-options',
            'val_dataloader.dataset.type=ImageNet',
            'val_dataloader.dataset.data_root=data',
            'val_dataloader.dataset.split=val',
            match="Error: val_dataloader.dataset reads 'data/val', which does not exist",
        )

    def test_missing_text(self, fails, config):
        fails(
            'train',
            config('tiny_text'),
            match='Error: train_dataloader.dataset reads '
            "'text.txt', which does not exist; put the data there or set AFT_MM_DATA",
        )

    def test_tta_without_a_pipeline(self, fails, config, tmp_path):
        (tmp_path / 'a.pth').touch()
        fails(
            'test',
            config('tiny'),
            'a.pth',
            '--tta',
            '--cfg-options',
            'tta_model=None',
            match='Error: --tta needs tta_model and tta_pipeline in .*tiny.py',
        )

    @pytest.mark.parametrize(('option', 'suffix'), [('--out', '.json'), ('--dump', '.pkl')])
    def test_wrong_suffix(self, fails, config, option, suffix):
        fails(
            'test',
            config('tiny'),
            'a.pth',
            option,
            'a.txt',
            match=f"Error: {option} must end in {suffix}, got 'a.txt'",
        )

    def test_no_test_loop(self, fails, config):
        fails(
            'test',
            config('tiny'),
            'a.pth',
            '--amp',
            '--cfg-options',
            'test_cfg=None',
            match='Error: testing needs test_cfg, which may be empty, in .*tiny.py',
        )

    def test_no_batch_size_to_scale_by(self, fails, config):
        fails(
            'train',
            config('tiny'),
            '--auto-scale-lr',
            '--cfg-options',
            'auto_scale_lr=None',
            match='Error: --auto-scale-lr needs auto_scale_lr.base_batch_size in .*tiny.py',
        )

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
    def test_unknown_key_of_a_mixer(self, run, root, config, tmp_path):
        result = run(
            root / 'tools/train.py',
            config('tiny'),
            '--cfg-options',
            'model.backbone.token_mixer.kernel=3',
            cwd=tmp_path,
        )
        line = only_error(result)
        assert 'AFTConv' in line and "'kernel'" in line

    @pytest.mark.parametrize(
        ('options', 'message'),
        [
            (
                [
                    'train_dataloader.dataset.type=CIFAR10',
                    'train_dataloader.dataset.download=False',
                ],
                'Cannot find CIFAR10 dataset in data/pictures',
            ),
            ([], 'Found 0 files in subfolders of: '),
        ],
    )
    def test_empty_data(self, run, root, config, tmp_path, options, message):
        (tmp_path / 'data/pictures/a').mkdir(parents=True)
        result = run(
            root / 'tools/train.py',
            config('tiny_images'),
            '--no-validate',
            '--cfg-options',
            'train_cfg.max_epochs=1',
            *options,
            cwd=tmp_path,
        )
        assert message in only_error(result)

    @pytest.mark.parametrize(
        ('schedule', 'message'),
        [
            (
                dict(type='aft_mm.InverseSqrtLR', begin=40, by_epoch=False),
                'InverseSqrtLR of param_scheduler begins at iteration 40 and ends at iteration 18, ',
            ),
            (
                dict(type='CosineAnnealingLR', T_max=9, begin=3, convert_to_iter_based=True),
                'CosineAnnealingLR of param_scheduler begins at epoch 3 and ends at epoch 3, ',
            ),
            (
                dict(type='ConstantLR', begin=2, end=1),
                'ConstantLR of param_scheduler begins at epoch 2 and ends at epoch 1, ',
            ),
        ],
    )
    def test_schedule_longer_than_the_run(
        self, tool, config, tmp_path, monkeypatch, schedule, message
    ):
        monkeypatch.chdir(tmp_path)
        Path('text.txt').write_bytes(np.random.default_rng(0).bytes(4000))
        cfg = Config.fromfile(config('tiny_text'))
        for settings in ([schedule], schedule):
            cfg.param_scheduler = settings
            name = f'{type(settings).__name__}-{tmp_path.name}.py'  # mmengine needs unique names of runs
            cfg.dump(name)
            with pytest.raises(SystemExit, match=f'^Error: .*{message}.*param_scheduler=None$'):
                tool('train').main([name])

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

    @pytest.mark.parametrize('size', [0, -3, 2.5, 'many'])
    def test_invalid_batch_size(self, tool, config, tmp_path, monkeypatch, size):
        monkeypatch.chdir(tmp_path)
        Path('text.txt').write_bytes(bytes(4000))
        options = ['--cfg-options', f'train_dataloader.batch_size={size}']
        with pytest.raises(SystemExit, match=r'^Error: train_dataloader.batch_size must be an int'):
            tool('train').main([str(config('tiny_text')), *options])

    def test_batch_larger_than_the_training_set(self, tool, config, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path('text.txt').write_bytes(np.random.default_rng(0).bytes(4000))
        cfg = Config.fromfile(config('tiny_text'))
        cfg.train_dataloader.update(batch_size=9999, drop_last=True)
        cfg.dump(f'batch-{tmp_path.name}.py')
        with pytest.raises(
            SystemExit,
            match='^Error: train_dataloader.batch_size must be small '
            r'enough for one batch of the \d+ samples .* got 9999$',
        ):
            tool('train').main([f'batch-{tmp_path.name}.py'])

    def test_text_shorter_than_a_context(self, run, root, config, tmp_path):
        (tmp_path / 'text.txt').write_bytes(bytes(range(250)) * 2)
        result = run(root / 'tools/train.py', config('tiny_text'), cwd=tmp_path)
        assert (
            "the val split of 'text.txt' has 25 bytes, which is shorter than one context of "
            '32 bytes'
        ) in only_error(result)

    def test_checkpoint_of_another_architecture(self, trained, run, root, config):
        folder, _ = trained
        command = [
            config('tiny'),
            '--work-dir',
            'other',
            '--cfg-options',
            'model.backbone.arch.embed_dims=32',
            'model.head.in_channels=32',
        ]
        for words in (
            [root / 'tools/test.py', command[0], 'here/epoch_1.pth', *command[1:]],
            [root / 'tools/train.py', *command, '--resume', 'here/epoch_1.pth'],
        ):
            line = only_error(run(*words, cwd=folder))
            assert 'D=32' in line and 'another shape' in line
        assert 'Epoch(' not in ''.join(path.read_text() for path in folder.glob('other/*/*.log'))

    def test_truncated_jpeg(self, run, root, config, tmp_path):
        for label in 'ab':
            for number in range(8):
                path = tmp_path / f'data/pictures/{label}/{number}.jpg'
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
                Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[:-20])
        result = run(root / 'tools/train.py', config('tiny_images'), '--no-validate', cwd=tmp_path)
        assert "'data/pictures/b/7.jpg' of the training set is truncated" in only_error(result)
        assert 'Epoch(train)' not in result.stdout + result.stderr

    def test_a_bug_keeps_its_traceback(self, run, root, config, tmp_path):
        (tmp_path / 'buggy.py').write_text(
            'from mmengine.hooks import Hook\nfrom mmengine.registry import HOOKS\n'
            '@HOOKS.register_module()\nclass BuggyHook(Hook):\n'
            '    def before_train(self, runner):\n        {}[0]\n'
        )
        (tmp_path / 'config.py').write_text(
            f"_base_ = '{config('tiny')}'\n"
            "custom_imports = dict(imports=['aft_mm.registry', 'recording_hooks', 'buggy'])\n"
            "custom_hooks = [dict(type='BuggyHook')]\n"
        )
        result = run(
            root / 'tools/train.py',
            'config.py',
            cwd=tmp_path,
            env={'PYTHONPATH': f'{tmp_path}:{root}/tests/configs'},
        )
        assert result.returncode == 1
        assert 'Traceback' in result.stderr and 'KeyError: 0' in result.stderr


@pytest.mark.parametrize(('tool', 'files'), [('train', ['a.py']), ('test', ['a.py', 'a.pth'])])
def test_slurm_scripts_pass_the_variables(run, root, tmp_path, tool, files):
    (tmp_path / 'srun').write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / 'srun').chmod(0o755)
    variables = {'PATH': f'{tmp_path}:/usr/bin:/bin', 'GPUS': '16', 'GPUS_PER_NODE': '4'}
    script = root / f'tools/slurm_{tool}.sh'
    result = run('bash', script, 'gpu', 'job', *files, '--amp', cwd=tmp_path, env=variables)
    expected = '--partition=gpu --job-name=job --gres=gpu:4 --ntasks=16 --ntasks-per-node=4 '
    expected += f'--cpus-per-task=5 --kill-on-bad-exit=1 {sys.executable} -u {root}/tools/{tool}.py'
    assert result.stdout.split() == [
        *expected.split(),
        *files,
        '--launcher',
        'slurm',
        '--amp',
    ]
