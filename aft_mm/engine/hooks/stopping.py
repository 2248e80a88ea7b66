"""Stop a run at any iteration, with a checkpoint from which it resumes."""

from abc import abstractmethod
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from mmengine.dist import broadcast
from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop, Runner

from aft_mm.checkpoint import ATOMIC_BACKEND, write_pointer
from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

from ..loops import StoppableEpochLoop, make_resumable, sampler_of

#: Entry of a checkpoint's meta with the position inside an epoch.
INSIDE_EPOCH = 'inside_epoch'
#: Entry of a checkpoint's meta with the time used.
TIME_BUDGET = 'time_budget'


class StopHook(Hook):
    """Ends the training when :meth:`is_time` returns True, with a checkpoint to resume from.

    A run by epochs resumes with the remaining batches of the epoch in the same order.
    """

    priority = 'LOWEST'  # after the schedulers and CheckpointHook

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.is_up = False
        self.saved = -1  # iterations done at the last checkpoint that can be resumed

    @abstractmethod
    def is_time(self, runner: Runner) -> bool:
        """Return whether to stop, the same in all processes; called after every iteration."""

    @abstractmethod
    def announce(self, runner: Runner, iteration: int, checkpoint: str) -> None:
        pass

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.loaded = checkpoint.get('meta', {})

    def before_train(self, runner: Runner) -> None:
        loop = runner.train_loop
        make_resumable(loop)
        if not runner.iter:  # 0 if only weights were loaded
            return
        inside = self.loaded.get(INSIDE_EPOCH, {})
        if inside.get('num_done'):
            _resume_inside_epoch(loop, **inside)
        if inside.get('sampler_seed') is not None:  # without a fixed seed runs differ
            sampler_of(loop.dataloader).seed = inside['sampler_seed']

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        self.is_up = self.is_up or self.is_time(runner)
        # A checkpoint between two steps would also hold gradients.
        if (
            not self.is_up
            or not runner.optim_wrapper.should_update()
            or self.is_last_train_iter(runner)
        ):
            return
        runner.train_loop.stop_training = True
        if self.can_save(runner, batch_idx):
            self._save(runner, runner.epoch, runner.iter + 1)

    def can_save(self, runner: Runner, batch_idx: int) -> bool:
        """Return whether a checkpoint here can be resumed; at an epoch's end it comes later."""
        loop = runner.train_loop
        return isinstance(loop, IterBasedTrainLoop) or (
            isinstance(loop, StoppableEpochLoop)
            and not self.end_of_epoch(loop.dataloader, batch_idx)
        )

    def after_train_epoch(self, runner: Runner) -> None:
        loop = runner.train_loop
        if self.is_up and loop.stop_training and not isinstance(loop, IterBasedTrainLoop):
            self._save(runner, runner.epoch + 1, runner.iter)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        loop, meta = runner.train_loop, checkpoint['meta']
        inside = isinstance(loop, StoppableEpochLoop)
        meta[INSIDE_EPOCH] = dict(
            num_done=loop.num_done_at(meta['epoch'], meta['iter']) if inside else 0,
            epoch_length=len(loop.dataloader),
            sampler_seed=getattr(sampler_of(loop.dataloader), 'seed', None),
        )
        if 'optimizer' in checkpoint:  # the best weights are saved without
            self.saved = meta['iter']

    def _save(self, runner: Runner, epoch: int, iteration: int) -> None:
        if runner.rank:
            return
        hub = runner.message_hub
        if self.saved != iteration:
            path = Path(runner.work_dir, f'iter_{iteration}.pth')
            options = dict(meta=dict(epoch=epoch, iter=iteration), backend_args=ATOMIC_BACKEND)
            runner.save_checkpoint(runner.work_dir, path.name, **options)
            hub.update_info('last_ckpt', str(path))
            write_pointer(runner.work_dir, str(path))
        self.announce(runner, iteration, hub.get_info('last_ckpt'))


def _resume_inside_epoch(
    loop: StoppableEpochLoop, num_done: int, epoch_length: int, **others: Any
) -> None:
    if len(loop.dataloader) != epoch_length:
        raise UserError(
            f'the checkpoint was written after {num_done} of the {epoch_length} iterations of an '
            f'epoch, but an epoch of this run has {len(loop.dataloader)}; resume with the '
            'previous batch size, data and number of processes'
        )
    loop.num_done = num_done


@HOOKS.register_module()
class TimeBudgetHook(StopHook):
    """End the training after ``days`` + ``hours`` + ``minutes``, with a checkpoint to resume from.

    The time counts from the first batch on, with validation and checkpoints, over all resumed runs.
    A run by epochs stops inside the epoch without validation and resumes there, with the same batch
    size and number of processes.

    Args:
        days, hours, minutes: Parts of the budget.
        interval: Iterations between two checks of the clock, by which the run may exceed the
            budget.

    Raises:
        ValueError: The budget is not positive and finite, or ``interval`` is below 1.
    """

    def __init__(
        self, days: float = 0, hours: float = 0, minutes: float = 0, interval: int = 10
    ) -> None:
        for name, value in dict(days=days, hours=hours, minutes=minutes).items():
            check_number(f'{name} of TimeBudgetHook', value, 0)
        seconds = 86400.0 * days + 3600.0 * hours + 60.0 * minutes
        check_number('the time of TimeBudgetHook in seconds', seconds, above=0)
        check_int('interval of TimeBudgetHook', interval, 1)
        super().__init__()
        self.budget = seconds
        self.interval = interval
        self.used_before = 0.0
        self.start = 0.0

    def before_train(self, runner: Runner) -> None:
        self.start = monotonic()
        before = self.loaded.get(TIME_BUDGET)
        if runner.iter and before:  # else nothing or a run without a budget is resumed
            self.used_before = before['seconds']
            if self.used_before >= self.budget and runner.iter < runner.max_iters:
                raise UserError(
                    f'the time budget of {_duration(self.budget)} is used up, as the run took '
                    f'{_duration(self.used_before)} so far; to resume, give TimeBudgetHook more'
                )
        super().before_train(runner)

    def is_time(self, runner: Runner) -> bool:
        return self.every_n_train_iters(runner, self.interval) and agreed(
            self.used() >= self.budget
        )

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        super().before_save_checkpoint(runner, checkpoint)
        checkpoint['meta'][TIME_BUDGET] = dict(seconds=self.used())

    def used(self) -> float:
        return self.used_before + monotonic() - self.start

    def announce(self, runner: Runner, iteration: int, checkpoint: str) -> None:
        runner.logger.info(
            f'The time budget of {_duration(self.budget)} is used up: {_duration(self.used())} at '
            f'iteration {iteration}; the checkpoint is {checkpoint}; to resume, give '
            'TimeBudgetHook more and train with --resume'
        )


def agreed(decision: bool) -> bool:
    """Return the decision of the first process in all processes."""
    decided = torch.tensor(decision, dtype=torch.uint8)
    broadcast(decided)
    return bool(decided)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
