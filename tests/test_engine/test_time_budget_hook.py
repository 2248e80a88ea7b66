"""TimeBudgetHook and PeriodicCheckpointHook on runs of 3 epochs of 6 iterations, a second each."""

import copy
import functools
import itertools
import json
import multiprocessing
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper, OptimWrapperDict

from aft_mm.engine import CheckpointCompatibilityHook, ConsoleRunner, TimeBudgetHook
from aft_mm.engine.hooks import checkpointing
from aft_mm.engine.runner import start_distributed, wrappers_of
from aft_mm.errors import UserError
from aft_mm.registry import DATASETS, METRICS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS

from ..helpers import free_port

SECOND = 1 / 60  # in minutes
HOOKS_OF_RUNS = (
    *('FiniteLossHook', 'CheckImagesHook', 'SanityCheckHook', 'EpochTimeHook', 'BitsPerDimHook'),
    *('ResumeCheckHook', 'ValidateFirstHook'),
)
# Only the order of the samples is random: an uninterrupted run can be repeated exactly.
INFINITE = dict(type='InfiniteSampler', shuffle=True)
CHANGES = {
    None: {},
    'by iterations': {
        'train_cfg': dict(_delete_=True, by_epoch=False, max_iters=18, val_interval=9),
        'train_dataloader.sampler': INFINITE,
        'default_hooks.checkpoint': dict(by_epoch=False, interval=6),
        'param_scheduler': [dict(type='CosineAnnealingLR', T_max=18, by_epoch=False)],
    },
}
TWO = {
    'model.type': 'aft_mm.TwoBudgetModels',
    'optim_wrapper': dict(_delete_=True, constructor='aft_mm.TwoOptimizers'),
    'custom_hooks': [
        dict(type='EMAHook', momentum=0.1),
        dict(type='aft_mm.RegularizationHook', weight=0.1),
        dict(type='aft_mm.CompileHook', module='other', backend='eager'),
        *(dict(type=f'aft_mm.{name}') for name in HOOKS_OF_RUNS),
    ],
}


@DATASETS.register_module()
class BudgetRows(torch.utils.data.Dataset):
    def __init__(self, num):
        rows = torch.randn(num, 5, generator=torch.Generator().manual_seed(0))
        self.items = [dict(inputs=row, targets=row.sum()) for row in rows]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@MODELS.register_module()
class BudgetModel(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(5, 1)

    def forward(self, inputs, targets, mode='tensor'):
        errors = (self.layer(inputs).squeeze(1) - targets) ** 2
        return dict(loss=errors.mean()) if mode == 'loss' else [dict(error=e) for e in errors]


class Penalised(torch.nn.Linear):
    def regularization_loss(self):
        return self.weight.square().mean()


@MODELS.register_module()
class TwoBudgetModels(BudgetModel):
    """The loss of each optimizer also gives gradients to the other."""

    def __init__(self):
        super().__init__()
        self.other = Penalised(5, 1)

    def forward(self, inputs, targets, mode='tensor'):
        return super().forward(inputs, targets - self.other(inputs).squeeze(1), mode)

    def train_step(self, data, optim_wrapper):
        for wrapper in wrappers_of(optim_wrapper).values():
            with wrapper.optim_context(self):
                loss, values = self.parse_losses(self(**data, mode='loss'))
            wrapper.update_params(loss)
        return values


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class TwoOptimizers:
    """AdamW after each iteration and SGD after each fourth one."""

    def __init__(self, **configs):
        pass

    def __call__(self, model):
        adam, sgd = torch.optim.AdamW, torch.optim.SGD
        one = OptimWrapper(adam(model.layer.parameters(), 3e-3))
        return OptimWrapperDict(
            one=one,
            other=OptimWrapper(sgd(model.other.parameters(), 0.01), accumulative_counts=4),
        )


@METRICS.register_module()
class BudgetError(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [sample['error'].item() for sample in data_samples]

    def compute_metrics(self, results):
        return dict(error=sum(results) / len(results))


def loader(num, batch_size, shuffle):
    return dict(
        batch_size=batch_size,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=shuffle),
        dataset=dict(type='aft_mm.BudgetRows', num=num),
        collate_fn=dict(type='default_collate'),
    )


CONFIG = dict(
    default_scope='mmengine',
    model=dict(type='aft_mm.BudgetModel'),
    train_dataloader=loader(96, 16, True),
    val_dataloader=loader(65, 32, False),
    val_evaluator=dict(type='aft_mm.BudgetError'),
    train_cfg=dict(by_epoch=True, max_epochs=3, val_interval=1),
    val_cfg=dict(),
    optim_wrapper=dict(
        optimizer=dict(type='AdamW', lr=3e-3, weight_decay=0.05), clip_grad=dict(max_norm=1.0)
    ),
    param_scheduler=[
        dict(type='LinearLR', start_factor=0.1, by_epoch=False, begin=0, end=4),
        dict(type='CosineAnnealingLR', T_max=3, convert_to_iter_based=True),
    ],
    default_hooks=dict(
        timer=dict(type='IterTimerHook'),
        logger=dict(type='LoggerHook', interval=2),
        param_scheduler=dict(type='ParamSchedulerHook'),
        checkpoint=dict(
            type='aft_mm.SafeCheckpointHook', interval=1, save_best='error', rule='less'
        ),
        sampler_seed=dict(type='DistSamplerSeedHook'),
        exact_resume=dict(type='aft_mm.ExactResumeHook'),
    ),
    custom_hooks=[dict(type='EMAHook', momentum=0.1)],
    visualizer=dict(type='Visualizer'),
    randomness=dict(seed=0),
)
NUMBER = itertools.count()  # runs of one name would share their messages


class Clock(Hook):
    """A clock of one second per iteration; the machine fails at a given time."""

    def __init__(self):
        self.now, self.iterations, self.validated, self.fail_after = 100.0, [], [], None

    def __call__(self):
        return self.now

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.now += 1
        self.iterations.append(runner.iter + 1)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.fail_after:
            raise InterruptedError

    def after_val_epoch(self, runner, metrics=None):
        self.validated.append(runner.iter)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(checkpointing, 'monotonic', clock)
    return clock


def build(work_dir, seconds=None, resume=False, interval=1, **changes):
    config = Config(copy.deepcopy(CONFIG))
    config.merge_from_dict(copy.deepcopy(changes))
    config.update(work_dir=str(work_dir), resume=resume, experiment_name=f'run {next(NUMBER)}')
    if seconds:
        config.default_hooks.time_budget = dict(
            type='aft_mm.TimeBudgetHook', minutes=seconds * SECOND, interval=interval
        )
    return ConsoleRunner.from_cfg(config)


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """The last checkpoint of an uninterrupted run, by the changes of the config."""

    @functools.cache
    def call(changes=None):
        runner = build(tmp_path_factory.mktemp('whole'), **CHANGES[changes])
        runner.train()
        return load(runner)

    return call


@pytest.fixture
def train(clock, tmp_path):
    """Train for a number of seconds and return the runner; the records of the clock are reset."""

    def call(seconds=None, folder='work', resume=False, fail_after=None, **changes):
        runner = build(tmp_path / folder, seconds, resume, **changes)
        clock.iterations, clock.validated, clock.fail_after = [], [], fail_after
        runner.register_hook(clock)
        if resume:
            runner.register_hook(CheckpointCompatibilityHook(resume=True))
        runner.train()
        return runner

    return call


def load(runner_or_folder, name=None):
    folder = Path(getattr(runner_or_folder, 'work_dir', runner_or_folder))
    path = folder / name if name else Path((folder / 'last_checkpoint').read_text())
    return torch.load(path, weights_only=True)


def assert_same_state(one, other):
    for part in ('state_dict', 'ema_state_dict', 'param_schedulers'):
        assert str(one[part]) == str(other[part]), part
    for part in ('state_dict', 'ema_state_dict'):
        assert all(torch.equal(value, other[part][key]) for key, value in one[part].items())


@pytest.mark.parametrize('name', CHANGES)
def test_a_stopped_run_resumes_like_an_uninterrupted_one(train, clock, whole, name):
    stopped = train(8, **CHANGES[name])
    assert clock.iterations == list(range(1, 9))
    assert stopped.iter == 8
    meta = load(stopped)['meta']
    assert meta['iter'] == 8 and meta['time_budget']['seconds'] == 8
    (log,) = Path(stopped.work_dir).glob('*/*.log')
    assert (
        'The time budget of 0:00:08 is used up: 0:00:08 at iteration 8; the checkpoint is '
        f'{stopped.work_dir}/iter_8.pth; to resume, give'
    ) in log.read_text()

    resumed = train(100, resume=True, **CHANGES[name])
    assert clock.iterations == list(range(9, 19))
    assert load(resumed)['meta']['time_budget']['seconds'] == 18
    assert_same_state(load(resumed), whole(name))


@pytest.mark.parametrize('name', CHANGES)
def test_a_killed_run_loses_no_more_than_its_minutes(train, clock, whole, name, tmp_path):
    hook = dict(type='aft_mm.PeriodicCheckpointHook', minutes=4 * SECOND, interval=1)
    changes = {**CHANGES[name], 'default_hooks.minutes': hook}
    killed_at = 17 if name else 11
    with pytest.raises(InterruptedError):
        train(fail_after=killed_at, **changes)
    # That of iteration 4 has gone with the next one. A validation, at 9, saves beside the best.
    regular = {'iter_6.pth', 'iter_9.pth', 'iter_12.pth'} if name else {'epoch_1.pth'}
    found = {path.name for path in (tmp_path / 'work').glob('[ei]*.pth')}
    assert found == regular | {f'iter_{killed_at - 1}.pth'}
    resumed = train(resume=True, **changes)
    assert clock.iterations == list(range(killed_at, 19))
    assert_same_state(load(resumed), whole(name))


@pytest.mark.parametrize(('seconds', 'killed_at', 'saved'), [(None, 9, 6), (9, None, 12)])
def test_a_run_of_two_optimizers_resumes_between_their_steps(
    train, clock, tmp_path, seconds, killed_at, saved
):
    hook = dict(type='aft_mm.PeriodicCheckpointHook', minutes=SECOND, interval=1)
    changes = {**TWO, 'default_hooks.minutes': hook} if seconds else TWO
    whole = load(train(folder='whole', **changes))
    assert whole['meta']['run']['optimizer'] == 'AdamW, SGD'
    with pytest.raises(InterruptedError) if killed_at else nullcontext():
        train(seconds, fail_after=killed_at, **changes)
    found = load(tmp_path / 'work')
    assert found['meta']['iter'] == saved and found['gradients'][0].keys() >= {'layer.weight'}
    resumed = load(train(resume=True, **changes))
    assert clock.iterations == list(range(saved + 1, 19))
    assert_same_state(resumed, whole)
    assert str(resumed['optimizer']) == str(whole['optimizer'])


@pytest.mark.parametrize(('first', 'then'), [({}, TWO), (TWO, {})], ids=['one', 'two'])
def test_a_run_of_other_optimizers_is_refused(train, first, then):
    hooks = [dict(type='aft_mm.ResumeCheckHook'), dict(type='EMAHook', momentum=0.1)]
    model = {'model.type': 'aft_mm.TwoBudgetModels', 'custom_hooks': hooks}
    train(3, **{**model, **first})
    with pytest.raises(UserError, match='holds the state of AdamW.*, but the run has AdamW'):
        train(resume=True, **{**model, **then})


def test_a_run_of_two_optimizers_of_an_earlier_version_resumes(train, tmp_path):
    with pytest.raises(InterruptedError):
        train(fail_after=9, **TWO)
    path = tmp_path / 'work/epoch_1.pth'
    checkpoint = torch.load(path, weights_only=False)
    checkpoint['meta']['run']['optimizer'] = 'OptimWrapperDict'
    torch.save(checkpoint, path)
    hooks = [dict(type='aft_mm.ResumeCheckHook'), dict(type='EMAHook', momentum=0.1)]
    train(resume=True, **{**TWO, 'custom_hooks': hooks})


def test_a_checkpoint_of_the_epoch_is_one_of_the_minutes(train, tmp_path):
    hook = dict(type='aft_mm.PeriodicCheckpointHook', minutes=6 * SECOND, interval=1)
    with pytest.raises(InterruptedError):
        train(fail_after=8, **{'default_hooks.minutes': hook})
    assert [path.name for path in (tmp_path / 'work').glob('[ei]*.pth')] == ['epoch_1.pth']


def test_an_unfinished_epoch_is_neither_counted_nor_validated(train, clock):
    stopped = train(8)
    assert (stopped.epoch, clock.validated) == (1, [6])
    assert load(stopped)['meta']['epoch'] == 1
    train(100, resume=True)
    assert clock.validated == [12, 18]


def test_several_stops_in_one_epoch(train, clock, whole):
    for seconds in (7, 9):
        train(seconds, resume=seconds > 7)
    assert clock.iterations == [8, 9]
    assert_same_state(load(train(100, resume=True)), whole())


@pytest.mark.parametrize('interval', [1, 2])
def test_at_the_end_of_an_epoch_its_checkpoint_and_validation_are_the_last(
    train, clock, whole, interval
):
    """With CheckpointHook's interval 2 the epoch would have no checkpoint."""
    changes = {'default_hooks.checkpoint.interval': interval}
    stopped = train(6, **changes)
    assert (clock.iterations[-1], clock.validated, stopped.epoch) == (6, [6], 1)
    files = sorted(path.name for path in Path(stopped.work_dir).glob('[ei]*.pth'))
    assert files == [['epoch_1.pth'], ['iter_6.pth']][interval - 1]
    assert_same_state(load(train(100, resume=True, **changes)), whole())


def test_the_clock_is_checked_every_interval_and_the_stop_follows_a_step(train, clock):
    train(2, interval=4)
    assert clock.iterations[-1] == 4
    train(5, folder='accumulating', **{'optim_wrapper.accumulative_counts': 4})
    assert clock.iterations[-1] == 8


def test_the_last_iteration_is_not_a_stop(train, clock):
    finished = train(18)
    assert clock.iterations[-1] == 18 and clock.validated[-1] == 18
    assert Path(finished.work_dir, 'last_checkpoint').read_text().endswith('epoch_3.pth')
    train(18, resume=True)  # nothing is left to do
    assert clock.iterations == []


def test_a_kill_loses_the_time_since_the_last_checkpoint_only(train, clock):
    train(8)
    with pytest.raises(InterruptedError):
        train(100, resume=True, fail_after=14)
    resumed = train(17, resume=True)
    assert clock.iterations[0] == 13  # after epoch 2, which took 12 seconds
    assert load(resumed)['meta']['iter'] == 17


def test_without_time_left_nothing_is_trained(train, clock):
    train(8)
    message = 'the time budget of 0:00:08 is used up, as the run took 0:00:08 so far; to resume'
    with pytest.raises(UserError, match=message):
        train(8, resume=True)
    assert clock.iterations == []


def test_loaded_weights_do_not_use_up_time(train, clock):
    stopped = train(8)
    train(3, folder='tuned', load_from=str(Path(stopped.work_dir, 'iter_8.pth')))
    assert clock.iterations == [1, 2, 3]


def test_a_random_order_of_samples_is_restored(train, whole):
    """Without a fixed seed every process samples another one."""
    train(8)
    resumed = train(100, resume=True, **{'train_dataloader.sampler.seed': 6})
    assert_same_state(load(resumed), whole())


def test_best_weights_are_not_a_checkpoint_to_resume_from(clock):
    hook = TimeBudgetHook(minutes=1)
    loop = SimpleNamespace(dataloader=torch.utils.data.DataLoader([0]))
    hook.before_save_checkpoint(SimpleNamespace(train_loop=loop), dict(meta=dict(epoch=0, iter=3)))
    assert hook.saved == -1


def test_an_epoch_of_another_length_is_refused(train):
    train(8)
    message = 'after 2 of the 6 iterations of an epoch, but .* has 12; resume with the previous bat'
    with pytest.raises(UserError, match=message):
        train(100, resume=True, **{'train_dataloader.batch_size': 8})


def test_the_parts_add_up_and_invalid_ones_are_refused():
    assert TimeBudgetHook(days=7, hours=1.5, minutes=2).budget == 7 * 86400 + 5400 + 120
    wrong = [{}, dict(days=1, minutes=-1), dict(hours=float('nan')), dict(days='7')]
    for parts in (*wrong, dict(days=1e308)):  # which has more seconds than a float holds
        with pytest.raises(ValueError, match='of TimeBudgetHook .*must be a finite number'):
            TimeBudgetHook(**parts)
    with pytest.raises(ValueError, match='interval of TimeBudgetHook must be an int, 1 or larger'):
        TimeBudgetHook(days=1, interval=0)


def train_rank(rank, port, folder):
    """The first process has 8 seconds, the other one has forever."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1')
    os.environ['MASTER_PORT'] = str(port)
    clock = Clock()
    ticks = itertools.count()
    checkpointing.monotonic = (lambda: next(ticks)) if rank == 0 else (lambda: 0)
    config = Config(dict(launcher='pytorch'))
    start_distributed(config)
    changes = dict(config, **{'train_dataloader.batch_size': 8})
    runner = build(folder / 'work', seconds=8, **changes)
    runner.register_hook(clock)
    runner.train()
    (folder / f'{rank}.json').write_text(json.dumps(clock.iterations))


@pytest.mark.skipif(torch.cuda.is_available(), reason='mmengine starts NCCL itself')
def test_two_processes_stop_together(tmp_path):
    context, port = multiprocessing.get_context('fork'), free_port()
    ranks = [context.Process(target=train_rank, args=(rank, port, tmp_path)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    (log,) = (tmp_path / 'work').glob('*/*.log')
    assert log.read_text().count('is used up') == 1
    iterations = [json.loads((tmp_path / f'{rank}.json').read_text()) for rank in (0, 1)]
    last = load(tmp_path / 'work')['meta']['iter']
    assert iterations[0] == iterations[1] == list(range(1, last + 1)) and 6 < last < 9
