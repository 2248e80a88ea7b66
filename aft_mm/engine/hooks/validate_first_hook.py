"""The validation that a checkpoint has not seen."""

from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop, Runner

from aft_mm.registry import HOOKS


@HOOKS.register_module()
class ValidateFirstHook(Hook):
    """Have a run whose schedule looks at the validation see it also where it was stopped.

    mmengine saves an epoch before it is validated, so that a resumed run would miss the validation
    between, and go on at another rate than one that was never stopped. With ``ReduceOnPlateauLR``
    or the like it is made up for before the training; the weights are those of the checkpoint.
    """

    priority = 'LOWEST'  # after a resume has been checked, and a run inside an epoch found

    def before_train(self, runner: Runner) -> None:
        """Validate, where the run before would have."""
        loop, schedules = runner.train_loop, runner.param_schedulers
        waiting = isinstance(schedules, list) and any(
            getattr(schedule, 'need_val_args', False) for schedule in schedules
        )
        if not waiting or not isinstance(loop, EpochBasedTrainLoop) or runner.val_loop is None:
            return
        resumed_at_end = 0 < runner.epoch < runner.max_epochs and not getattr(loop, 'num_done', 0)
        due = runner.epoch >= loop.val_begin and runner.epoch % loop.val_interval == 0
        if resumed_at_end and due:
            runner.val_loop.run()
