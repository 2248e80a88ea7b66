"""Data that the model cannot take, found before the first iteration."""

import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from aft_mm.errors import UserError
from aft_mm.registry import HOOKS

from .task_model import task_model


@HOOKS.register_module()
class FirstSampleHook(Hook):
    """Push the first sample of every data set through model and head before it is used.

    An image of another size than the pipeline or the model expects, a text context longer than the
    position table, or a token outside the vocabulary then ends in one sentence, not after the data
    loader has started or, worse, at the first validation. An empty data set is refused too.
    """

    def __init__(self) -> None:
        self.validation_checked = False

    def before_train(self, runner: Runner) -> None:
        """Run ``model(..., mode='predict')`` on a batch of one, for training and validation.

        Raises:
            UserError: a data set is empty or its first sample cannot be used, with the reason.
        """
        self._check(runner, 'training', runner.train_loop.dataloader)
        if runner.val_loop is not None:
            self.before_val(runner)

    def before_val(self, runner: Runner) -> None:
        """The same for validation, once in a run."""
        if not self.validation_checked:
            self._check(runner, 'validation', runner.val_loop.dataloader)
            self.validation_checked = True

    def before_test(self, runner: Runner) -> None:
        """The same for a test."""
        self._check(runner, 'test', runner.test_loop.dataloader)

    def _check(self, runner: Runner, name: str, loader: DataLoader) -> None:
        if not len(loader.dataset):
            raise UserError(f'the {name} set is empty')
        model = task_model(runner)
        mode = model.training
        model.eval()
        try:
            batch = model.data_preprocessor(loader.collate_fn([loader.dataset[0]]), False)
            with torch.no_grad():
                model(**batch, mode='predict')
        except ValueError as error:
            raise UserError(
                f'the first sample of the {name} set cannot be used: {error}'
            ) from error
        finally:
            model.train(mode)
