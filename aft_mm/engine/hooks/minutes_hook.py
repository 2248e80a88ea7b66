"""Checkpoints by the clock, so that a run that is killed loses minutes and not an epoch."""

from pathlib import Path
from time import monotonic
from typing import Any

import torch
from mmengine.dist import broadcast
from mmengine.runner import Runner

from aft_mm.checks import check_int, check_number
from aft_mm.registry import HOOKS

from .stop_hook import StopHook


@HOOKS.register_module()
class MinutesHook(StopHook):
    """Write ``iter_N.pth`` when there was no checkpoint for ``minutes``, and train on.

    ``last_checkpoint`` names it, and ``--resume`` goes on from there, inside the epoch as
    :class:`TimeBudgetHook` says. It is removed when the next checkpoint is there; the one that a
    run was resumed from stays.

    Args:
        minutes: Between two checkpoints.
        interval: Iterations between two looks at the clock, that of the first process.

    Raises:
        ValueError: ``minutes`` is no time, or ``interval`` no int of at least 1.
    """

    def __init__(self, minutes: float = 5, interval: int = 10) -> None:
        check_number('minutes of MinutesHook', minutes, above=0)
        check_int('interval of MinutesHook', interval, 1)
        super().__init__()
        self.seconds = 60.0 * minutes
        self.interval = interval
        self.last = 0.0
        self.written: Path | None = None

    def before_train(self, runner: Runner) -> None:
        """Start the clock."""
        super().before_train(runner)
        self.last = monotonic()

    def is_time(self, runner: Runner) -> bool:
        """Every ``interval`` iterations, what the clock of the first process says."""
        if not self.every_n_train_iters(runner, self.interval):
            return False
        up = torch.tensor(monotonic() - self.last >= self.seconds, dtype=torch.uint8)
        broadcast(up)
        return bool(up)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Save if it is time, after an iteration that steps."""
        # Asked always, as every process must: is_up differs between them once the first has saved.
        self.is_up = self.is_time(runner) or self.is_up
        if self.is_up and runner.optim_wrapper.should_update() and self.goes_on(runner, batch_idx):
            self.is_up = False
            self._save(runner, runner.epoch, runner.iter + 1)
        self._remove_outdated(runner)

    def after_train_epoch(self, runner: Runner) -> None:
        """CheckpointHook has saved, if the epoch is one of its interval."""
        self._remove_outdated(runner)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Whoever saves, the minutes begin anew."""
        super().before_save_checkpoint(runner, checkpoint)
        if 'optimizer' in checkpoint:
            self.last, self.is_up = monotonic(), False

    def announce(self, runner: Runner, iteration: int, checkpoint: str) -> None:
        """Remember the file."""
        self._remove_outdated(runner)
        self.written = Path(checkpoint)
        runner.logger.info(f'Saving checkpoint at {iteration} iterations')

    def _remove_outdated(self, runner: Runner) -> None:
        """Remove the file as soon as ``last_checkpoint`` names another one."""
        newest = runner.message_hub.get_info('last_ckpt', None)
        if self.written is not None and newest is not None and Path(newest) != self.written:
            self.written.unlink(missing_ok=True)
            self.written = None
