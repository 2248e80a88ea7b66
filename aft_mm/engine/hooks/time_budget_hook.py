"""Stop a run when its time is used up, so that it can go on later."""

from datetime import timedelta
from time import monotonic

import torch
from mmengine.dist import broadcast
from mmengine.runner import Runner

from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

from .stop_hook import StopHook

#: Of the meta of a checkpoint: the time that was used.
META = 'time_budget'


@HOOKS.register_module()
class TimeBudgetHook(StopHook):
    """End the training after ``days`` + ``hours`` + ``minutes``, with a checkpoint to go on from.

    Every ``interval`` iterations the first process looks at its clock and tells the others. When
    the time is up, training stops after the iteration, or after the next one that steps where
    gradients are accumulated. The checkpoint ``iter_N.pth`` in the work dir is written, unless
    there is one of this iteration, and ``last_checkpoint`` names it. ``--resume`` goes on from
    there; the log says where it is. ``max_keep_ckpts`` does not count it.

    - *What counts.* The time from the first iteration's data on, validations and checkpoints
      included. Every checkpoint holds what was used until it was written, and a resumed run goes
      on counting there: of a killed process the time up to the checkpoint counts from which it is
      resumed. A resumed run without time left is refused before it trains.
    - *Inside an epoch.* A run by epochs stops there too, and is not validated then. Resumed, it
      goes on with the batches of the epoch that are left, in the same order, at the same iteration
      and learning rate: every sample is seen once. What is drawn at random (dropout, augmentation)
      is drawn from another seed, so that the weights are those of a run that was never stopped
      only where nothing is drawn. That needs batches and processes of the same number as before.
    - *At the end of an epoch* the run stops after the validation that the loop has there, if any:
      a resume is bit-identical where it is from the checkpoint of any epoch.
    - *By iterations* mmengine's loop stops, validates and goes on as it always does. A train loop
      that is neither of mmengine's two stops where it looks at ``stop_training``, and what it goes
      on with is its own affair.

    Args:
        days: Of the budget; the three add up.
        hours: Of the budget.
        minutes: Of the budget.
        interval: Iterations between two looks. The run may take so many iterations too long; in a
            distributed run every look waits for all processes.

    Raises:
        ValueError: the budget is no time, or ``interval`` no int of at least 1.
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
        """Start the clock where the run before stopped it, and go on inside an epoch.

        Raises:
            UserError: no time is left, or the epochs of the run before had another length.
        """
        self.start = monotonic()
        before = self.loaded.get(META)
        if runner.iter and before:  # else nothing is resumed, or a run without a budget
            self.used_before = before['seconds']
            if self.used_before >= self.budget and runner.iter < runner.max_iters:
                raise UserError(
                    f'the time budget of {spoken(self.budget)} is used up, as the run took '
                    f'{spoken(self.used_before)} before; to go on, give TimeBudgetHook more'
                )
        super().before_train(runner)

    def is_time(self, runner: Runner) -> bool:
        """Every ``interval`` iterations, what the clock of the first process says."""
        if not self.every_n_train_iters(runner, self.interval):
            return False
        up = torch.tensor(self.used() >= self.budget, dtype=torch.uint8)
        broadcast(up)
        return bool(up)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Write the time into the checkpoint, and how far the epoch is."""
        super().before_save_checkpoint(runner, checkpoint)
        checkpoint['meta'][META] = dict(seconds=self.used())

    def used(self) -> float:
        """Seconds that the run has taken, those before it was resumed included."""
        return self.used_before + monotonic() - self.start

    def announce(self, runner: Runner, iteration: int, checkpoint: str) -> None:
        """Log how much time was used and how to go on."""
        runner.logger.info(
            f'The time budget of {spoken(self.budget)} is used up: {spoken(self.used())} at '
            f'iteration {iteration}; the checkpoint is {checkpoint}; to go on, give '
            'TimeBudgetHook more and train with --resume'
        )


def spoken(seconds: float) -> str:
    """``7 days, 0:00:00``."""
    return str(timedelta(seconds=round(seconds)))
