"""What a run prints, and the runner that prints it."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.logging import HistoryBuffer, MessageHub, MMLogger
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import LogProcessor
from torch import nn

from aft_mm.analysis.run_logs import read_scalars, validations
from aft_mm.engine import BitsPerDimHook, ConsoleRunner, build_runner
from aft_mm.engine.runner import DETAILS, decayed_biases, readable, shorten_console
from aft_mm.errors import UserError
from aft_mm.evaluation import Likelihood


def lines_of(by_epoch, name, **values):
    """Return the lines of mmengine's LogProcessor for training, validation and test."""
    hub = MessageHub.get_instance(name)
    for key, value in values.items():
        hub.log_scalars[key.replace('__', '/', 1)] = HistoryBuffer([value], [1])
    hub.update_info('eta', 3725)
    loader = type('Loader', (), dict(__len__=lambda self: 120))()
    loop = SimpleNamespace(dataloader=loader, max_epochs=12)
    runner = SimpleNamespace(
        message_hub=hub,
        iter=19,
        epoch=2,
        max_epochs=12,
        max_iters=1200,
        _train_loop=loop,
        train_loop=loop,
        train_dataloader=loader,
        val_dataloader=loader,
        test_dataloader=loader,
        val_loop=loop,
        test_loop=loop,
        model=None,
    )
    processor = LogProcessor(by_epoch=by_epoch)
    return (
        processor.get_log_after_iter(runner, 19, 'train')[1],
        processor.get_log_after_iter(runner, 19, 'val')[1],
        processor.get_log_after_epoch(runner, 120, 'val')[1],
        processor.get_log_after_epoch(runner, 120, 'test')[1],
    )


VALUES = {
    'train__lr': 1e-5,  # of the first layer
    'train__base_lr': 1e-3,
    'train__time': 0.25,
    'train__data_time': 0.125,
    'train__loss': 1.5,
    'train__decode.loss_ce': 1.0,
    'val__time': 0.5,
    'val__data_time': 0.1,
    'val__coco/cell phone_precision': 0.25,
    'test__accuracy/top1': 97.5,
    'test__time': 0.5,
}


@pytest.mark.parametrize(
    ('by_epoch', 'head', 'validation'),
    [(True, 'epoch  3,  20/120', 'epoch 2, '), (False, 'iteration   20/1200', '')],
)
def test_the_lines_of_mmengine_become_words(by_epoch, head, validation):
    training, during, result, test = map(readable, lines_of(by_epoch, str(by_epoch), **VALUES))
    assert training == (
        f'{head}   loss 1.5000   rate 0.001   0.25 s per step   1:02:05 left   '
        'decode.loss_ce 1.0000'
    )
    during = ' '.join(during.split())
    assert during == f'{validation}validation 20/120 0.5 s per step 1:02:05 left'
    assert result == f'{validation}validation   coco/cell phone_precision 0.2500'
    assert test == 'test   accuracy/top1 97.5000'


def test_the_rates_of_several_optimizers_are_apart():
    values = {'train__one.lr': 1e-3, 'train__other.lr': 0.01, 'train__loss': 1.5}
    training = readable(lines_of(True, 'several', **values)[0])
    assert training.endswith('loss 1.5000   one.lr 1.0000e-03   other.lr 1.0000e-02')


@pytest.mark.parametrize(
    'message',
    ['Epoch(val) [3][5/5]    counts: [[1  2]]', 'Epoch(train) [3] took 5.1 s', 'a: b', ''],
)
def test_other_messages_stay(message):
    assert readable(message) == message


def test_the_console_has_no_date_and_the_file_has(tmp_path, capfd):
    file = tmp_path / 'run.log'
    for level in ('INFO', 'DEBUG'):
        logger = MMLogger(f'short {level}', log_file=str(file), log_level=level)
        shorten_console(logger)
        for _ in range(2):
            logger.warning('weights decay')
        logger.info('Epoch(val) [3][8/8]    mIoU: 12.5000  data_time: 0.1  time: 0.2')
        logger.error('no metric')
        logger.info('Exp name: tiny')
        shown, text = capfd.readouterr().out.splitlines(), file.read_text()
        assert text.count('mmengine - WARNING - weights decay') == 1
        assert 'Epoch(val) [3][8/8]    mIoU: 12.5000' in text and 'Exp name' in text
        if level == 'DEBUG':
            assert len(shown) == 4 and all(' - mmengine - ' in line for line in shown)
            continue
        assert [line.rpartition(' - ')[2] for line in shown] == [
            'weights decay',
            'epoch 3, validation   mIoU 12.5000',
            'no metric',
        ]
        assert not any('mmengine' in line or '/' in line for line in shown)


CONFIGS = Path(__file__).parents[1] / 'configs'


@pytest.fixture
def runner(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(CONFIGS)

    def build(name, **changes):
        cfg = Config.fromfile(CONFIGS / 'tiny_without_chance.py')
        cfg.merge_from_dict(
            {
                'work_dir': str(tmp_path),
                'experiment_name': name,
                'custom_hooks': [],
                'visualizer': dict(type='Visualizer'),
                **changes,
            }
        )
        runner = build_runner(cfg)
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        return runner

    return build


@pytest.mark.parametrize('level', ['INFO', 'DEBUG'])
def test_the_details_are_in_the_file_and_at_debug_on_the_console(runner, capfd, level):
    built = runner(
        f'details-{level}',
        log_level=level,
        **{'optim_wrapper.paramwise_cfg': dict(norm_decay_mult=0.0)},
    )
    assert isinstance(built, ConsoleRunner)
    console, file = capfd.readouterr().out, Path(built.logger.log_file).read_text()
    seen = [detail for detail in DETAILS[:4] if detail.strip() in console]
    assert seen == (list(DETAILS[:4]) if level == 'DEBUG' else [])
    assert all(detail.strip() in file for detail in DETAILS[:4])
    assert len(console.splitlines()) < 5 or level == 'DEBUG'


def test_a_position_bias_that_decays_is_warned_of_in_one_line(runner, capfd):
    sentence = r'WARNING - weight decay of 0.05 pulls \d+ position biases to 0, such as backbone\.'
    runner('decayed')
    assert len(re.findall(sentence, capfd.readouterr().out)) == 1
    left_alone = dict(custom_keys=dict(pos_bias=dict(decay_mult=0.0)))
    built = runner('left-alone', **{'optim_wrapper.paramwise_cfg': left_alone})
    assert 'position biases' not in capfd.readouterr().out
    assert decayed_biases(built.model, built.optim_wrapper) == ''


def test_a_rate_of_no_parameter_is_named(runner, capfd):
    keys = {'pos_bais': dict(lr_mult=0.0), 'head': dict(lr_mult=0.1), 'cls': dict(decay_mult=0.0)}
    runner('no-parameter', **{'optim_wrapper.paramwise_cfg': dict(custom_keys=keys)})
    sentence = "no parameter of the model has lr_mult of paramwise_cfg.custom_keys: 'pos_bais'"
    assert sentence in re.sub(r'\s+', ' ', capfd.readouterr().out)


def test_the_rate_follows_the_samples_of_an_update(runner, capfd):
    changes = {
        'optim_wrapper.accumulative_counts': 4,
        'optim_wrapper.paramwise_cfg': dict(bias_lr_mult=2.0),  # only then there is a base_lr
        'train_dataloader.batch_size': 6,
    }
    built = runner('accumulated', **changes)
    built.scale_lr(built.optim_wrapper, dict(enable=True, base_batch_size=8))
    assert 'an update takes 4 batches: of each' in capfd.readouterr().out
    rates = {group['lr'] for group in built.optim_wrapper.param_groups}
    assert rates == {3e-3 * 3, 6e-3 * 3}
    assert built.optim_wrapper.get_lr()['base_lr'] == [3e-3 * 3]
    optimizers = {name: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0) for name in 'ab'}
    several = OptimWrapperDict(**{name: OptimWrapper(x, 4) for name, x in optimizers.items()})
    built.scale_lr(several, dict(enable=True, base_batch_size=8))
    assert [optimizer.param_groups[0]['lr'] for optimizer in optimizers.values()] == [3.0, 3.0]
    several['b']._accumulative_counts = 2
    with pytest.raises(UserError, match='accumulative_counts of all optimizers must be equal'):
        built.scale_lr(several, dict(enable=True, base_batch_size=8))
    with pytest.raises(ValueError, match='auto_scale_lr.base_batch_size must be a finite number'):
        built.scale_lr(built.optim_wrapper, dict(enable=True, base_batch_size='8'))


@pytest.fixture
def trained(run, root, config, tmp_path):
    """Return a function of further lines of the tiny config: what it prints, and when it validates."""

    def train(lines):
        (tmp_path / 'own.py').write_text(f'_base_ = {config("tiny")!r}\n{lines}')
        env = dict(PYTHONPATH=f'{root}/tests/configs')
        done = run(root / 'tools/train.py', 'own.py', '--work-dir', 'out', cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        steps = [step for step, _ in validations(read_scalars(tmp_path / 'out'), 'accuracy/top1')]
        return done.stdout, steps

    return train


def test_a_run_by_iterations_logs_and_saves_by_them(trained, tmp_path):
    printed, steps = trained(
        'train_cfg = dict(_delete_=True, by_epoch=False, max_iters=12, val_interval=3)\n'
        'default_hooks = dict(checkpoint=dict(by_epoch=False, interval=5))\n'
    )
    assert steps == [3, 6, 9, 12]
    assert not re.search(r'epoch|Epoch', printed)
    for number in (5, 10, 12):
        assert (tmp_path / f'out/iter_{number}.pth').exists()


def test_a_run_by_epochs_logs_them_with_the_runtime_of_mmseg(trained):
    assert trained('log_processor = dict(by_epoch=False)\n')[1] == [6, 12, 18]


def test_a_validated_loss_is_no_mean_of_all_epochs(runner):
    processor = runner('losses').log_processor
    hub = MessageHub.get_instance('validated')
    for key, values in {
        'val/my/loss': (5, 3, 1),
        'val/time': (1, 2, 6),
        'train/loss': (5, 1),
    }.items():
        hub.log_scalars[key] = HistoryBuffer(values, [1] * len(values))
    found = SimpleNamespace(message_hub=hub)
    scalars = processor._collect_scalars([], found, 'val')
    assert scalars == {'my/loss': 1, 'time': 3}
    assert processor._collect_scalars([], found, 'train') == {'loss': 3}


def test_another_runner_is_taken_where_the_config_names_one(runner):
    assert not isinstance(runner('other', runner_type='Runner'), ConsoleRunner)


def test_a_folder_that_cannot_be_written_is_refused(runner, tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(UserError, match="work_dir '.*file/work' cannot be written: Not a dir"):
        runner('nowhere', work_dir=str(tmp_path / 'file/work'))


@pytest.mark.parametrize(
    ('smoothing', 'scalars'), [(0.0, {'train/loss_bits_per_char': 3.0}), (0.1, {})]
)
def test_the_loss_is_logged_in_bits_and_nats(smoothing, scalars):
    model = nn.Module()
    model.head = SimpleNamespace(label_smoothing=smoothing)
    said = []
    hub = MessageHub.get_instance(f'bits {smoothing}')
    run = SimpleNamespace(
        model=model,
        message_hub=hub,
        logger=SimpleNamespace(info=said.append),
        val_loop=SimpleNamespace(evaluator=Evaluator([Likelihood(per='char')])),
    )
    hook = BitsPerDimHook()
    hook.before_train(run)
    hook.after_train_iter(run, 0, outputs=dict(loss=torch.tensor(3 * math.log(2))))
    found = {name: buffer.current() for name, buffer in hub.log_scalars.items()}
    assert found == pytest.approx(scalars)
    assert len(said) == len(scalars)
