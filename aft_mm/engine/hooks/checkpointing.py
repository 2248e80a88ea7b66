"""Write checkpoints safely, and check those that are loaded."""

import inspect
import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from mmengine.dist import all_gather_object, is_main_process
from mmengine.hooks import CheckpointHook, Hook
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from torch import Tensor

from aft_mm.checkpoint import (
    ATOMIC_BACKEND,
    load_weights,
    plain_hub,
    plain_value,
    remove_parts,
    write_pointer,
)
from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS
from aft_mm.structures import BEST_SCORE

from ..runner import task_model
from .stopping import INSIDE_EPOCH, StopHook, agreed

#: Entry of a checkpoint's meta: what a resume compares.
RUN = 'run'


def waiting_gradients(runner: Runner) -> list[dict[str, Tensor]]:
    wrapper = runner.optim_wrapper
    if not isinstance(wrapper, OptimWrapper) or wrapper.should_update():
        return []
    gradients = {
        name: parameter.grad.cpu()
        for name, parameter in task_model(runner).named_parameters()
        if parameter.grad is not None
    }
    return all_gather_object(gradients)


@HOOKS.register_module()
class SafeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, robust against crashes and foreign checkpoints.

    - Files are replaced atomically, and a checkpoint is readable with ``weights_only=True``.
    - A resumed run removes only files of its own folder with the names of a run, and warns about
      others.
    - ``save_best='auto'`` knows that fewer bits and errors are better.

    Args:
        **kwargs: Those of :class:`mmengine.hooks.CheckpointHook`.

    Raises:
        UserError: An argument is not one of them.
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault('less_keys', (*self._default_less_keys, 'bits_per_', 'error_rate'))
        elsewhere = '://' in str(kwargs.get('out_dir')) or kwargs.get('file_client_args')
        if not elsewhere and not kwargs.get('backend_args'):
            kwargs['backend_args'] = ATOMIC_BACKEND
        super().__init__(**kwargs)
        if self.args:  # for save_checkpoint, which gets all of its arguments from here
            name = next(iter(self.args))
            close = get_close_matches(name, inspect.signature(CheckpointHook).parameters, n=1)
            hint = f'; did you mean {close[0]!r}?' if close else ''
            raise UserError(f'the checkpoint hook has no argument {name!r}{hint}')

    def before_train(self, runner: Runner) -> None:
        folder = Path(runner.work_dir)
        if self.out_dir not in (None, runner.work_dir):
            folder = Path(self.out_dir, folder.name)
        if is_main_process():
            remove_parts(folder)
        info = runner.message_hub.runtime_info
        for key in [key for key in info if key.startswith(('best_', 'keep_ckpt_ids', 'last_ckpt'))]:
            reason = self._foreign(key, info[key], folder, runner)
            if reason:
                if key != 'last_ckpt':  # for messages only
                    runner.logger.warning(
                        f'{key} of the checkpoint, {info[key]!r:.200}, {reason} and is left alone'
                    )
                del info[key]
        if 'keep_ckpt_ids' in info:
            paths = {x: Path(folder, self.filename_tmpl.format(x)) for x in info['keep_ckpt_ids']}
            info['keep_ckpt_ids'] = [
                step for step, path in paths.items() if path.is_file() and not path.is_symlink()
            ]
        self.last_ckpt = info.get('last_ckpt')  # else the first best weights would not update it
        with _without_own_deprecations(runner):
            super().before_train(runner)

    def _foreign(self, key: str, value: Any, folder: Path, runner: Runner) -> str:
        if key.startswith('best_score'):
            if isinstance(value, Tensor | np.generic) and math.prod(value.shape) == 1:
                value = value.item()
            is_number = isinstance(value, Real) and not math.isnan(value)
            return '' if is_number else 'is not a number'
        if key == 'keep_ckpt_ids':
            loaded = runner.cfg.get('load_from')
            if loaded and Path(loaded).expanduser().resolve().parent != folder.resolve():
                return 'belongs to a run in another folder'
            whole = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
            return '' if whole else 'is not a list of epochs or iterations'
        prefix = 'best_' if key.startswith('best_ckpt') else ''
        path = Path(value) if isinstance(value, str) else Path()
        if not (
            path.name.startswith(prefix)
            and path.suffix == '.pth'
            and path.parent.resolve() == folder.resolve()
        ):
            return "is not a checkpoint in this run's folder"
        return 'is not a file' if path.is_symlink() or path.is_dir() else ''

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        checkpoint['message_hub'] = plain_hub(checkpoint['message_hub'])
        checkpoint['meta'] = plain_value(checkpoint['meta'])
        for key in {'param_schedulers', 'optimizer'} & checkpoint.keys():
            checkpoint[key] = plain_value(checkpoint[key])
        checkpoint['meta'][RUN] = run_properties(runner)
        score = runner.message_hub.get_info(BEST_SCORE, None)
        if score is not None:  # next to the classes, for `aft_mm predict` and `aft_mm publish`
            checkpoint['meta'].setdefault('dataset_meta', {})[BEST_SCORE] = score

    def _save_best_checkpoint(self, runner: Runner, metrics: dict) -> None:
        """Write the new best weights, then remove the previous; mmengine removes first."""
        if not self.save_best:
            return
        unknown = {*self.key_indicators} - {'auto', *metrics}
        if unknown:
            raise UserError(
                'save_best of the checkpoint hook must be a metric of the validation '
                f'({", ".join(metrics)}), got {min(unknown)!r}'
            )
        several = len(self.key_indicators) > 1
        paths: Any = self.best_ckpt_path_dict if several else vars(self)
        before = {key: paths[key] for key in (list(paths) if several else ['best_ckpt_path'])}
        paths.update(dict.fromkeys(before))  # hidden from mmengine
        super()._save_best_checkpoint(runner, metrics)
        for key, old in before.items():
            if paths[key] is None:
                paths[key] = old
            elif old and old != paths[key] and is_main_process() and self.file_backend.isfile(old):
                self.file_backend.remove(old)
                runner.logger.info(f'The previous best checkpoint {old} is removed')

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        """Write, name, then remove the oldest; mmengine removes first."""
        # Gathered here, because only the first process writes.
        runner.waiting_gradients = waiting_gradients(runner)
        hub, outdated = runner.message_hub, None
        before = hub.get_info('last_ckpt', None)
        if self.max_keep_ckpts > 0 and step not in self.keep_ckpt_ids:
            if len(self.keep_ckpt_ids) == self.max_keep_ckpts:
                outdated = self.keep_ckpt_ids.popleft()
            self.keep_ckpt_ids.append(step)
            hub.update_info('keep_ckpt_ids', list(self.keep_ckpt_ids))
        name = self.filename_tmpl.format(step)
        path = self.file_backend.join_path(self.out_dir, name)
        hub.update_info('last_ckpt', path)  # which is saved, too
        try:
            runner.save_checkpoint(
                self.out_dir,
                name,
                self.file_client_args,
                save_optimizer=self.save_optimizer,
                save_param_scheduler=self.save_param_scheduler,
                meta=meta,
                by_epoch=self.by_epoch,
                backend_args=self.backend_args,
            )
        except BaseException:  # the previous one is complete
            hub.update_info('last_ckpt', before)
            raise
        finally:
            runner.waiting_gradients = []
        self.last_ckpt = path
        if is_main_process():
            write_pointer(runner.work_dir, path)
            if outdated is not None:
                old = self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(outdated))
                if self.file_backend.isfile(old) and not os.path.islink(old):
                    self.file_backend.remove(old)


@contextmanager
def _without_own_deprecations(runner: Runner) -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(('"FileClient" will be', '"HardDiskBackend" is'))

    for handler in runner.logger.handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in runner.logger.handlers:
            handler.removeFilter(keep)


def run_properties(runner: Runner) -> dict[str, Any]:
    """Return what the bits of a run depend on, for the meta of its checkpoints."""
    return dict(
        num_processes=runner.world_size,
        num_threads=torch.get_num_threads(),
        backends=os.environ.get('AFT_MM_BACKEND', ''),
        optimizer=type(getattr(runner.optim_wrapper, 'optimizer', runner.optim_wrapper)).__name__,
    )


@HOOKS.register_module()
class PeriodicCheckpointHook(StopHook):
    """Write ``iter_N.pth`` whenever the last checkpoint is ``minutes`` old.

    The next checkpoint replaces it, except one from which the run was resumed.

    Args:
        minutes: Time between two checkpoints.
        interval: Iterations between two checks of the clock.
    """

    def __init__(self, minutes: float = 5, interval: int = 10) -> None:
        check_number('minutes of PeriodicCheckpointHook', minutes, above=0)
        check_int('interval of PeriodicCheckpointHook', interval, 1)
        super().__init__()
        self.seconds = 60.0 * minutes
        self.interval = interval
        self.last = 0.0
        self.written: Path | None = None

    def before_train(self, runner: Runner) -> None:
        super().before_train(runner)
        self.last = monotonic()

    def is_time(self, runner: Runner) -> bool:
        return self.every_n_train_iters(runner, self.interval) and agreed(
            monotonic() - self.last >= self.seconds
        )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        # All must take part: is_up differs between processes once the first has saved.
        self.is_up = self.is_time(runner) or self.is_up
        if self.is_up and runner.optim_wrapper.should_update() and self.can_save(runner, batch_idx):
            self.is_up = False
            self._save(runner, runner.epoch, runner.iter + 1)
        self._remove_outdated(runner)

    def after_train_epoch(self, runner: Runner) -> None:
        self._remove_outdated(runner)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        super().before_save_checkpoint(runner, checkpoint)
        if 'optimizer' in checkpoint:
            self.last, self.is_up = monotonic(), False

    def announce(self, runner: Runner, iteration: int, checkpoint: str) -> None:
        self._remove_outdated(runner)
        self.written = Path(checkpoint)
        runner.logger.info(f'Saving checkpoint at {iteration} iterations')

    def _remove_outdated(self, runner: Runner) -> None:
        newest = runner.message_hub.get_info('last_ckpt', None)
        if self.written is not None and newest is not None and Path(newest) != self.written:
            self.written.unlink(missing_ok=True)
            self.written = None


@HOOKS.register_module()
class CheckpointCompatibilityHook(Hook):
    """Refuse a checkpoint of another architecture, which mmengine loads with only a warning.

    Args:
        strict: True requires exactly the tensors of the model and the same subwords; False allows
            what the model's loading allows.
        resume: Also refuse interpolated position biases, which do not fit the optimizer state, and
            a checkpoint from inside an epoch without a StopHook, which mmengine would repeat.
    """

    priority = 'VERY_HIGH'

    def __init__(self, strict: bool = True, resume: bool = False) -> None:
        self.strict = strict
        self.resume = resume

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        inside_epoch = checkpoint.get('meta', {}).get(INSIDE_EPOCH, {}).get('num_done')
        if (
            self.resume
            and inside_epoch
            and not any(isinstance(hook, StopHook) for hook in runner.hooks)
        ):
            raise UserError(
                'a run that was stopped inside an epoch only resumes there with '
                "dict(type='aft_mm.TimeBudgetHook', ...) among its hooks"
            )
        if self.strict:
            _check_subwords(runner, checkpoint.get('meta', {}), self.resume)
        resized = load_weights(task_model(runner), checkpoint, runner.experiment_name, self.strict)
        if resized and self.resume:
            raise UserError(
                f'a run cannot be resumed with {resized[0]} of another size, to which '
                'the state of the optimizer does not fit; start a new one with '
                'load_from=CHECKPOINT and without --resume'
            )


def _check_subwords(runner: Runner, meta: dict, resume: bool) -> None:
    saved = (meta.get('dataset_meta') or {}).get('subwords')
    if saved is None:
        return
    loop = runner.train_loop if resume else runner.test_loop
    current = (getattr(loop.dataloader.dataset, 'metainfo', None) or {}).get('subwords')
    if current != saved:
        raise UserError(
            f'the checkpoint was trained with subwords of fingerprint {saved}, but '
            f'those of the data have {current}; use the previous subwords file'
        )
