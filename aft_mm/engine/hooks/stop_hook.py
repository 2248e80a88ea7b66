"""Stop a run at any iteration, so that it can go on from there."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch.utils.data import DataLoader

from aft_mm.checkpoint import write_pointer
from aft_mm.errors import UserError

from ..epoch_loop import StoppableEpochLoop
from .safe_checkpoint_hook import WHOLE_FILES

#: Of the meta of a checkpoint: how far the epoch is.
INSIDE_EPOCH = 'inside_epoch'


class StopHook(Hook):
    """Ends the training when :meth:`is_time` says so, with a checkpoint to go on from.

    Training stops after an iteration that steps. The checkpoint ``iter_N.pth`` in the work dir is
    written, unless there is one of this iteration, and ``last_checkpoint`` names it. A run by
    epochs that stopped inside one goes on with the batches that are left of it, in the same order.
    """

    priority = 'LOWEST'  # after the schedulers have stepped and CheckpointHook has saved

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}  # meta of the checkpoint, if there is one
        self.is_up = False
        self.saved = -1  # iterations done at the last checkpoint that can be resumed

    @abstractmethod
    def is_time(self, runner: Runner) -> bool:
        """Whether to stop; asked after every iteration, and every process says the same."""

    @abstractmethod
    def announce(self, runner: Runner, iteration: int, checkpoint: str) -> None:
        """Say after how many iterations the run has stopped and from where it goes on.

        Called in the first process only.
        """

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Keep what the checkpoint says until it is known whether the run is resumed."""
        self.loaded = checkpoint.get('meta', {})

    def before_train(self, runner: Runner) -> None:
        """Go on inside an epoch, if the checkpoint was written there.

        Raises:
            UserError: the epochs of the run before had another length.
        """
        loop = runner.train_loop
        if type(loop) is EpochBasedTrainLoop:
            # Chosen here, as configs name loops of epochs by by_epoch=True.
            loop.__class__ = StoppableEpochLoop
        inside = self.loaded.get(INSIDE_EPOCH, {})
        if runner.iter and inside.get('num_done'):  # 0 where only weights were loaded
            _go_on_inside_epoch(loop, **inside)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Stop the loop if it is time and it can stop here."""
        self.is_up = self.is_up or self.is_time(runner)
        # Accumulated gradients are in no checkpoint.
        if (
            not self.is_up
            or not runner.optim_wrapper.should_update()
            or self.is_last_train_iter(runner)
        ):
            return
        runner.train_loop.stop_training = True
        if self.goes_on(runner, batch_idx):
            self._save(runner, runner.epoch, runner.iter + 1)

    def goes_on(self, runner: Runner, batch_idx: int) -> bool:
        """Whether a checkpoint after this iteration says where the run goes on.

        At the end of an epoch that is the checkpoint after the epoch.
        """
        loop = runner.train_loop
        return isinstance(loop, IterBasedTrainLoop) or (
            isinstance(loop, StoppableEpochLoop)
            and not self.end_of_epoch(loop.dataloader, batch_idx)
        )

    def after_train_epoch(self, runner: Runner) -> None:
        """Save at the end of an epoch if CheckpointHook has not."""
        loop = runner.train_loop
        if self.is_up and loop.stop_training and not isinstance(loop, IterBasedTrainLoop):
            self._save(runner, runner.epoch + 1, runner.iter)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Write into the checkpoint how far the epoch is."""
        loop, meta = runner.train_loop, checkpoint['meta']
        inside = isinstance(loop, StoppableEpochLoop)
        meta[INSIDE_EPOCH] = dict(
            num_done=loop.num_done_at(meta['epoch'], meta['iter']) if inside else 0,
            epoch_length=len(loop.dataloader),
            sampler_seed=getattr(sampler(loop.dataloader), 'seed', None),
        )
        if 'optimizer' in checkpoint:  # the best weights are saved without
            self.saved = meta['iter']

    def _save(self, runner: Runner, epoch: int, iteration: int) -> None:
        """Write the checkpoint, unless there is one, and say how to go on."""
        if runner.rank:
            return
        hub = runner.message_hub
        if self.saved != iteration:
            path = Path(runner.work_dir, f'iter_{iteration}.pth')
            runner.save_checkpoint(
                runner.work_dir,
                path.name,
                meta=dict(epoch=epoch, iter=iteration),
                backend_args=WHOLE_FILES,
            )
            hub.update_info('last_ckpt', str(path))
            write_pointer(runner.work_dir, str(path))
        self.announce(runner, iteration, hub.get_info('last_ckpt'))


def _go_on_inside_epoch(
    loop: StoppableEpochLoop, num_done: int, epoch_length: int, sampler_seed: int | None
) -> None:
    """Have the batches skipped that were trained on, which stand first in the same order."""
    if len(loop.dataloader) != epoch_length:
        raise UserError(
            f'the checkpoint was written after {num_done} of the {epoch_length} iterations of an '
            f'epoch, but an epoch of this run has {len(loop.dataloader)}; resume with the '
            'batch size, the data and the number of processes of before'
        )
    loop.num_done = num_done
    if sampler_seed is not None:  # a run without a fixed seed drew another one
        sampler(loop.dataloader).seed = sampler_seed


def sampler(loader: DataLoader) -> Any:
    """What orders the samples; of a batch sampler of one's own the loader does not know it."""
    return getattr(loader.batch_sampler, 'sampler', loader.sampler)
