"""The validation that a checkpoint has not seen."""

from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, Runner

from aft_mm.registry import HOOKS


@HOOKS.register_module()
class ValidateFirstHook(Hook):
    """Have a run that goes on from the end of an epoch validate that epoch before it trains.

    mmengine saves an epoch before it is validated. A schedule that looks at the validation, as
    ``ReduceOnPlateauLR`` does, would otherwise miss the one between, and the run would go on at
    another rate than one that was never stopped. Weights are those of the checkpoint, and so is
    what is measured.
    """

    priority = 'LOWEST'  # after a resume has been checked, and a run inside an epoch found

    def before_train(self, runner: Runner) -> None:
        """Validate, where the run before would have."""
        loop = runner.train_loop
        if not isinstance(loop, EpochBasedTrainLoop) or runner.val_loop is None:
            return
        resumed_at_end = 0 < runner.epoch < runner.max_epochs and not getattr(loop, 'num_done', 0)
        due = runner.epoch >= loop.val_begin and runner.epoch % loop.val_interval == 0
        if resumed_at_end and due:
            runner.val_loop.run()
