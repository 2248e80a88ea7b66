"""Data that the model cannot take, found before the first iteration."""

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from aft_mm.registry import HOOKS

from ..errors import UserError
from .task_model import task_model


@HOOKS.register_module()
class FirstSampleHook(Hook):
    """Push the first training and the first validation sample through the model before training.

    An image of another size than the pipeline or the model expects, a text context longer than the
    position table, or a token outside the vocabulary then ends in one sentence, not in a traceback
    after the data loader has started or, worse, at the first validation.
    """

    def before_train(self, runner: Runner) -> None:
        """Run ``model(..., mode='tensor')`` on a batch of one, without gradients.

        Raises:
            UserError: the sample cannot be used, with the reason.
        """
        loops = dict(training=runner.train_loop, validation=runner.val_loop)
        model = task_model(runner)
        mode = model.training
        model.eval()
        for name, loop in loops.items():
            if loop is None:
                continue
            loader = loop.dataloader
            try:
                batch = model.data_preprocessor(loader.collate_fn([loader.dataset[0]]), False)
                with torch.no_grad():
                    model(**batch, mode='tensor')
            except ValueError as error:
                raise UserError(
                    f'the first sample of the {name} set cannot be used: {error}') from error
        model.train(mode)
