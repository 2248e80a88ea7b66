"""The loss of a likelihood beside the number that the validation gives."""

import math
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import Runner

from aft_mm.registry import HOOKS

from .task_model import task_model


@HOOKS.register_module()
class LossUnitHook(Hook):
    """Log ``loss_bits_per_X = loss / ln 2`` beside the loss in nats.

    X is what the metric :class:`aft_mm.evaluation.Likelihood` of the validation counts: dim, char,
    token, subword. Where there is no such metric, or the loss is smoothed and no likelihood, the
    log stays as it is.
    """

    priority = 'HIGH'  # before LoggerHook reads the scalars

    def __init__(self) -> None:
        self.per = ''

    def before_train(self, runner: Runner) -> None:
        """Find the unit and say it once."""
        metrics = runner.val_loop.evaluator.metrics if runner.val_loop is not None else []
        per = next((metric.per for metric in metrics if type(metric).__name__ == 'Likelihood'), '')
        if per and not getattr(task_model(runner).head, 'label_smoothing', 0.0):
            self.per = per
            runner.logger.info(
                f'loss is in nats per {per}, and loss_bits_per_{per} the same in '
                f'bits, as bits_per_{per} of the validation'
            )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Add the scalar, which is averaged as the loss is."""
        if self.per and outputs is not None:
            runner.message_hub.update_scalar(
                f'train/loss_bits_per_{self.per}', outputs['loss'].item() / math.log(2)
            )
