"""Stop a run when its time is used up, so that it can go on later."""

from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from mmengine.dist import broadcast
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch.utils.data import DataLoader

from aft_mm.checks import check_int, check_number
from aft_mm.cli.errors import UserError
from aft_mm.registry import HOOKS

from ..epoch_loop import StoppableEpochLoop

# Of the meta of a checkpoint; a dict of plain numbers, which safe loading lets through.
META = 'time_budget'


@HOOKS.register_module()
class TimeBudgetHook(Hook):
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
        UserError: the budget is no time, or ``interval`` no int of at least 1.
    """

    priority = 'LOWEST'  # after the schedulers have stepped and CheckpointHook has saved

    def __init__(self, days: float = 0, hours: float = 0, minutes: float = 0,
                 interval: int = 10) -> None:
        for name, value in dict(days=days, hours=hours, minutes=minutes).items():
            check_number(f'{name} of TimeBudgetHook', value, 0)
        seconds = 86400. * days + 3600. * hours + 60. * minutes
        check_number('the time of TimeBudgetHook in seconds', seconds, above=0)
        check_int('interval of TimeBudgetHook', interval, 1)
        self.budget = seconds
        self.interval = interval
        self.loaded: dict[str, Any] = {}  # what the checkpoint says, if there is one
        self.used_before = 0.
        self.start = 0.
        self.is_up = False
        self.saved = -1  # iterations done at the last checkpoint that can be resumed

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Keep what the checkpoint says until it is known whether the run is resumed."""
        self.loaded = checkpoint.get('meta', {}).get(META, {})

    def before_train(self, runner: Runner) -> None:
        """Start the clock where the run before stopped it, and go on inside an epoch.

        Raises:
            UserError: no time is left, or the epochs of the run before had another length.
        """
        loop = runner.train_loop
        if type(loop) is EpochBasedTrainLoop:
            # Chosen here, as configs name loops of epochs by by_epoch=True.
            loop.__class__ = StoppableEpochLoop
        self.start = monotonic()
        if not runner.iter or not self.loaded:  # nothing is resumed, or from a run without budget
            return
        self.used_before = self.loaded['seconds']
        if self.used_before >= self.budget and runner.iter < runner.max_iters:
            raise UserError(
                f'the time budget of {spoken(self.budget)} is used up, as the run took '
                f'{spoken(self.used_before)} before; to go on, give TimeBudgetHook more')
        if self.loaded['num_done']:
            self._go_on_inside_epoch(runner.train_loop)

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None,
                         outputs: dict | None = None) -> None:
        """Look at the clock, and stop the loop if it can stop here."""
        if self.every_n_train_iters(runner, self.interval):
            up = torch.tensor(self.used() >= self.budget, dtype=torch.uint8)
            broadcast(up)
            self.is_up = bool(up)
        # Accumulated gradients are in no checkpoint.
        if (not self.is_up or not runner.optim_wrapper.should_update()
                or self.is_last_train_iter(runner)):
            return
        loop = runner.train_loop
        loop.stop_training = True
        within = isinstance(loop, StoppableEpochLoop) and not self.end_of_epoch(
            loop.dataloader, batch_idx)
        if within or isinstance(loop, IterBasedTrainLoop):
            self._save(runner, runner.epoch, runner.iter + 1)

    def after_train_epoch(self, runner: Runner) -> None:
        """Save at the end of an epoch if CheckpointHook has not."""
        loop = runner.train_loop
        if self.is_up and loop.stop_training and not isinstance(loop, IterBasedTrainLoop):
            self._save(runner, runner.epoch + 1, runner.iter)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Write the time into the checkpoint, and how far the epoch is."""
        loop, meta = runner.train_loop, checkpoint['meta']
        inside = isinstance(loop, StoppableEpochLoop)
        meta[META] = dict(
            seconds=self.used(),
            num_done=loop.num_done_at(meta['epoch'], meta['iter']) if inside else 0,
            epoch_length=len(loop.dataloader),
            sampler_seed=getattr(sampler(loop.dataloader), 'seed', None))
        if 'optimizer' in checkpoint:  # the best weights are saved without
            self.saved = meta['iter']

    def used(self) -> float:
        """Seconds that the run has taken, those before it was resumed included."""
        return self.used_before + monotonic() - self.start

    def _go_on_inside_epoch(self, loop: StoppableEpochLoop) -> None:
        """Have the batches skipped that were trained on, which stand first in the same order."""
        num_done, length = self.loaded['num_done'], self.loaded['epoch_length']
        if len(loop.dataloader) != length:
            raise UserError(
                f'the checkpoint was written after {num_done} of the {length} iterations of an '
                f'epoch, but an epoch of this run has {len(loop.dataloader)}; resume with the '
                'batch size, the data and the number of processes of before')
        loop.num_done = num_done
        if self.loaded['sampler_seed'] is not None:  # a run without a fixed seed drew another one
            sampler(loop.dataloader).seed = self.loaded['sampler_seed']

    def _save(self, runner: Runner, epoch: int, iteration: int) -> None:
        """Write the checkpoint, unless there is one, and say how to go on."""
        if runner.rank:
            return
        hub = runner.message_hub
        if self.saved != iteration:
            path = Path(runner.work_dir, f'iter_{iteration}.pth')
            hub.update_info('last_ckpt', str(path))
            runner.save_checkpoint(
                runner.work_dir, path.name, meta=dict(epoch=epoch, iter=iteration))
            Path(runner.work_dir, 'last_checkpoint').write_text(str(path))
        runner.logger.info(
            f'The time budget of {spoken(self.budget)} is used up: {spoken(self.used())} at '
            f'iteration {iteration}; the checkpoint is {hub.get_info("last_ckpt")}; to go on, give '
            'TimeBudgetHook more and train with --resume')


def sampler(loader: DataLoader) -> Any:
    """What orders the samples; of a batch sampler of one's own the loader does not know it."""
    return getattr(loader.batch_sampler, 'sampler', loader.sampler)


def spoken(seconds: float) -> str:
    """``7 days, 0:00:00``."""
    return str(timedelta(seconds=round(seconds)))
