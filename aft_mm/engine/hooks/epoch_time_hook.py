"""How long an epoch takes."""

from time import perf_counter

from mmengine.hooks import Hook
from mmengine.runner import Runner

from aft_mm.registry import HOOKS


@HOOKS.register_module()
class EpochTimeHook(Hook):
    """Log the seconds of every epoch of training, without its checkpoint and its validation.

    They stand in the log and, as ``seconds_per_epoch``, in the scalars of the run. An epoch that a
    resumed run finishes is not counted.
    """

    priority = 'VERY_HIGH'  # before what else happens at the end of an epoch

    def __init__(self) -> None:
        self.begin: tuple[float, int] | None = None

    def before_train_epoch(self, runner: Runner) -> None:
        """Start the clock."""
        self.begin = perf_counter(), runner.iter

    def after_train_epoch(self, runner: Runner) -> None:
        """Stop it."""
        assert self.begin is not None
        start, first = self.begin
        if runner.iter - first < len(runner.train_loop.dataloader):
            return
        seconds = perf_counter() - start
        runner.logger.info(f'Epoch(train) [{runner.epoch + 1}] took {seconds:.1f} s')
        runner.visualizer.add_scalar('seconds_per_epoch', seconds, step=runner.epoch + 1)
