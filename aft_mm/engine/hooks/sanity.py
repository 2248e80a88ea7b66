"""Find invalid data and numbers early."""

import copy
import math
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from mmengine.dist import all_gather_object, all_reduce
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner, ValLoop
from torch import Tensor, nn
from torch.utils.data import DataLoader

from aft_mm.errors import UserError
from aft_mm.images import check_image
from aft_mm.registry import HOOKS

from ..runner import task_model, wrappers_of

NUM_THREADS = 16  # that read files


@HOOKS.register_module()
class CheckImagesHook(Hook):
    """Find unreadable image files in all data sets of a run before it starts.

    Not in those that replace such files in training, as :class:`aft_mm.datasets.ImageFolder` does.
    The end of each file is read, too, because OpenCV decodes a truncated JPEG without an error.
    Each rank checks its share.
    """

    def before_train(self, runner: Runner) -> None:
        self._check(runner, 'training', runner.train_dataloader)
        if runner.val_loop is not None:
            self._check(runner, 'validation', runner.val_loop.dataloader)

    def before_test(self, runner: Runner) -> None:
        self._check(runner, 'test', runner.test_loop.dataloader)

    def _check(self, runner: Runner, name: str, loader: DataLoader) -> None:
        dataset: Any = loader.dataset
        if not hasattr(dataset, 'get_data_info'):  # not one of mmengine's
            return
        if getattr(dataset, 'replaces_files', False):
            return
        infos = map(dataset.get_data_info, range(runner.rank, len(dataset), runner.world_size))
        # Once each, also in a RepeatDataset.
        paths = list(dict.fromkeys(info['img_path'] for info in infos if 'img_path' in info))
        if not paths:
            return
        runner.logger.info(f'checking {len(paths)} image files of the {name} set')
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(partial(check_image, name=name), paths))  # raises what they raise


@HOOKS.register_module()
class SanityCheckHook(Hook):
    """Run the first sample of every data set through the model before the set is used.

    That of the validation set goes through its metrics, too.
    """

    def __init__(self) -> None:
        self.validation_checked = False

    def before_train(self, runner: Runner) -> None:
        self._check(runner, 'training', runner.train_loop.dataloader)
        if runner.val_loop is not None:
            self.before_val(runner)

    def before_val(self, runner: Runner) -> None:
        if not self.validation_checked:
            self._check(runner, 'validation', runner.val_loop.dataloader)
            self.validation_checked = True

    def before_test(self, runner: Runner) -> None:
        self._check(runner, 'test', runner.test_loop.dataloader)

    def _check(self, runner: Runner, name: str, loader: DataLoader) -> None:
        dataset: Any = loader.dataset
        if not len(dataset):
            raise UserError(f'the {name} set is empty')
        model = task_model(runner)
        mode = model.training
        model.eval()
        try:
            batch = loader.collate_fn([dataset[0]])
            with torch.no_grad():
                found = model(**model.data_preprocessor(batch, False), mode='predict')
        except ValueError as error:
            raise UserError(
                f'the first sample of the {name} set cannot be used: {error}'
            ) from error
        finally:
            model.train(mode)
        # A loop or step of another kind adds to what is found.
        usual = type(model).val_step is BaseModel.val_step and type(runner.val_loop) is ValLoop
        if name == 'validation' and usual:
            evaluator: Any = copy.deepcopy(runner.val_loop.evaluator)  # it may count
            evaluator.process(data_samples=found, data_batch=batch)


@dataclass
class Notes:
    skipped: Counter[str] = field(default_factory=Counter)  # message: how often
    warnings: dict[str, str] = field(default_factory=dict)  # warning: first file

    def add(self, other: 'Notes') -> None:
        self.skipped.update(other.skipped)
        self.warnings = {**other.warnings, **self.warnings}


@HOOKS.register_module()
class SkippedDataReportHook(Hook):
    """Report the ``skipped`` files and ``warnings`` of samples, over all ranks."""

    def __init__(self) -> None:
        # By mode, as an iteration-based loop validates inside an epoch.
        self.notes: dict[str, Notes] = {}
        self.reported: set[str] = set()

    def _after_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Any = None,
        mode: str = 'train',
    ) -> None:
        notes = self.notes.setdefault(mode, Notes())
        for sample in data_batch['data_samples']:
            notes.add(Notes(Counter(sample.get('skipped', ())), sample.get('warnings', {})))

    def _after_epoch(self, runner: Runner, mode: str = 'train') -> None:
        notes = Notes()
        for of_rank in all_gather_object(self.notes.pop(mode, Notes())):
            notes.add(of_rank)
        if notes.skipped:
            lines = [
                f'\n  {message.removesuffix(".")} ({count} x)'
                for message, count in sorted(notes.skipped.items())
            ]
            runner.logger.warning(
                f'{_title(runner, mode)}: {len(notes.skipped)} file(s) cannot be used, sampled '
                f'{notes.skipped.total()} x and replaced by others:{"".join(lines)}'
            )
        for message in sorted(notes.warnings.keys() - self.reported):
            runner.logger.warning(f'{message}, the first one is {notes.warnings[message]!r}')
        self.reported |= notes.warnings.keys()


def _title(runner: Runner, mode: str) -> str:
    """Name the epoch that ended, as mmengine logs the same warning only once."""
    if mode == 'train':
        return f'train epoch {runner.epoch + 1}'
    if mode == 'val' and runner.iter:
        return f'val epoch {runner.epoch}' if runner.epoch else f'val iteration {runner.iter}'
    return mode


#: Begins the message of FiniteLossHook.
DIVERGED = 'the loss of iteration'


@HOOKS.register_module()
class FiniteLossHook(Hook):
    """Stop the run at a non-finite loss or gradient, before the optimizer step.

    Gradients are checked before clipping, which would spoil all of them. With float16 only a
    non-finite loss stops the run, because the loss scaler skips infinite gradients. Before a step
    the loss is that of ``mode='loss'``, after others the one that ``train_step`` returns.
    """

    def __init__(self) -> None:
        self.loss: Tensor | None = None
        self.is_checked = False  # in this iteration
        self.gradients: dict[str, Tensor] = {}  # largest absolute value by parameter
        self.largest_before = 'none'

    def before_train(self, runner: Runner) -> None:
        model = task_model(runner)

        def keep_loss(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            if kwargs.get('mode') != 'loss':
                return
            parts = output if isinstance(output, dict) else dict(loss=output)
            losses = {
                name: value for name, value in parts.items() if isinstance(value, Tensor | list)
            }
            if any('loss' in name for name in losses):
                self.loss = model.parse_losses(losses)[0].detach()

        def keep_gradient(name: str, parameter: nn.Parameter) -> None:
            self.gradients[name] = torch.linalg.vector_norm(
                parameter.grad, math.inf, dtype=torch.float32
            )

        model.register_forward_hook(keep_loss, with_kwargs=True)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(keep_gradient, name))
        for wrapper in wrappers_of(runner.optim_wrapper).values():
            wrapper.optimizer.register_step_pre_hook(lambda *_: self._check(runner, self.gradients))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        loss = outputs.get('loss') if isinstance(outputs, dict) else None
        if self.loss is None and not self.is_checked and isinstance(loss, Tensor):
            self.loss = loss.detach().mean()
        self._check(runner, {})
        self.is_checked = False

    @torch.compiler.disable  # `compile` of mmengine traces the step of the optimizer, and its hooks
    def _check(self, runner: Runner, gradients: dict[str, Tensor]) -> None:
        self.is_checked = True
        values = [*gradients.values()]
        if self.loss is not None:
            values.append(self.loss.float())
        if not values:
            return
        bad = (~torch.stack(values).isfinite().all()).int()
        all_reduce(bad, 'max')
        if not bad:
            self.loss = None
            if gradients:
                self.largest_before = _largest(gradients)
            return
        lr = max(
            group['lr']
            for wrapper in wrappers_of(runner.optim_wrapper).values()
            for group in wrapper.param_groups
        )
        loss = 'unknown' if self.loss is None else f'{self.loss.item():.6g}'
        raise UserError(
            f'{DIVERGED} {runner.iter + 1} is {loss} at a learning rate '
            f'of {lr:.6g}; its largest gradient is {_largest(self.gradients)}, that of the '
            f'previous step was {self.largest_before}; the weights are those before this step and '
            f'the last checkpoint is {runner.message_hub.get_info("last_ckpt", "none yet")}'
        )


def _largest(gradients: dict[str, Tensor]) -> str:
    if not gradients:
        return 'none'
    value, index = torch.stack(list(gradients.values())).max(0)
    return f'{value.item():.6g} of {list(gradients)[int(index)]}'
