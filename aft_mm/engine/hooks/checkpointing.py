"""Write checkpoints safely, and check those that a run is given."""

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
from mmengine.device import get_device
from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch import Tensor

from aft_mm.checkpoint import (
    ATOMIC_BACKEND,
    HUB_KEYS,
    load_weights,
    plain_hub,
    plain_value,
    remove_parts,
    write_pointer,
)
from aft_mm.checks import check_int, check_number
from aft_mm.errors import UserError
from aft_mm.openmmlab import warn
from aft_mm.registry import HOOKS

from ..runner import task_model
from .stopping import INSIDE_EPOCH, TIME_BUDGET, StopHook, agreed
from .training import waiting_gradients

#: Entry of a checkpoint's meta: what a resume compares.
RUN = 'run'
#: Entry of a checkpoint's meta: whether it was written after its validation.
VALIDATED = 'validated'
# Settings that newer versions of torch or a schedule add.
_NEW_SETTINGS = {
    'initial_lr',
    'maximize',
    'foreach',
    'capturable',
    'differentiable',
    'fused',
    'decoupled_weight_decay',
    'param_names',
}


@HOOKS.register_module()
class SafeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, robust against crashes and foreign checkpoints.

    - Files are replaced atomically; an old checkpoint is removed once the new one is on the disk.
    - A checkpoint holds tensors and plain types, readable with ``weights_only=True``.
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
        """Drop entries of a resumed checkpoint for files of another folder."""
        own = Path(runner.work_dir)
        folder = own if self.out_dir in (None, runner.work_dir) else Path(self.out_dir, own.name)
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
        """Return why an entry does not belong to this run, or ''."""
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
        checkpoint['meta'][RUN] = _properties(runner)

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
    """Hide the deprecation warning of mmengine's CheckpointHook."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(('"FileClient" will be', '"HardDiskBackend" is'))

    for handler in runner.logger.handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in runner.logger.handlers:
            handler.removeFilter(keep)


def _properties(runner: Runner) -> dict[str, Any]:
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

    Raises:
        ValueError: ``minutes`` is not positive, or ``interval`` is below 1.
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
        """Restart the clock, whichever hook writes the checkpoint."""
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
        """Load the weights before mmengine does."""
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
    own = (getattr(loop.dataloader.dataset, 'metainfo', None) or {}).get('subwords')
    if own != saved:
        raise UserError(
            f'the checkpoint was trained with subwords of fingerprint {saved}, but '
            f'those of the data have {own}; use the previous subwords file'
        )


@HOOKS.register_module()
class ResumeCheckHook(Hook):
    """Refuse to resume a run under other conditions than it started with.

    Refused are checkpoints without training state, another optimizer or schedule, averaged weights
    without EMAHook, and epochs of another length.
    """

    priority = 'VERY_HIGH'

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        try:
            self._check(runner, checkpoint)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                'the training state of the checkpoint is not as mmengine writes it '
                f'({type(error).__name__}: {error})'
            ) from error

    def _check(self, runner: Runner, checkpoint: dict) -> None:
        missing = {'meta', 'message_hub', 'optimizer'} - checkpoint.keys()
        missing = missing or {*HUB_KEYS} - checkpoint['message_hub'].keys()
        if missing:
            raise UserError(
                f'a run cannot be resumed from a checkpoint without {", ".join(sorted(missing))}, '
                'such as that of the best weights or a published one; start a new one with '
                'load_from=CHECKPOINT and without --resume'
            )
        meta = checkpoint['meta']
        _check_numbers(meta)
        saved = meta.get(RUN, {})
        averages = any(isinstance(hook, EMAHook) for hook in runner.hooks)
        if 'ema_state_dict' in checkpoint and not averages:
            raise UserError(
                'the checkpoint holds averaged weights, from which a run without EMAHook would '
                'resume; resume with the previous EMAHook among custom_hooks, or start a new run '
                'with load_from=CHECKPOINT'
            )
        if averages and 'ema_state_dict' not in checkpoint:
            warn('the checkpoint holds no averaged weights: the average of EMAHook starts here')
        _check_optimizer(runner, checkpoint['optimizer'], saved.get('optimizer'))
        _check_schedules(runner, checkpoint)
        self._check_progress(runner, meta, saved)

    def _check_progress(self, runner: Runner, meta: dict, saved: dict) -> None:
        loop, epoch, iteration = runner.train_loop, meta['epoch'], meta['iter']
        now = _properties(runner)
        before = saved.get('num_processes', now['num_processes'])
        unit, done, end = 'iteration', iteration, runner.max_iters
        if isinstance(loop, EpochBasedTrainLoop):
            unit, done, end = 'epoch', epoch, runner.max_epochs
            length = len(loop.dataloader)
            inside = meta.get(INSIDE_EPOCH, {}).get('num_done', 0)
            if iteration != epoch * length + inside:
                raise UserError(
                    f'the checkpoint is of iteration {iteration} in {epoch} epochs, but an epoch '
                    f'of this run has {length} iterations with {now["num_processes"]} processes; '
                    'resume with the previous batch size, data and number of processes '
                    f'({before} processes), from a checkpoint at the end of an epoch'
                )
        if before != now['num_processes']:
            warn(
                f'the checkpoint was written by {before} processes and the run resumes with '
                f'{now["num_processes"]}: samples are distributed differently, so the weights '
                'will not be those of an uninterrupted run'
            )
        threads = saved.get('num_threads', now['num_threads'])
        if threads != now['num_threads'] and get_device() == 'cpu':
            warn(
                f'the checkpoint was written with {threads} threads and the run resumes with '
                f'{now["num_threads"]}: sums are rounded differently, so the weights will not '
                'be bit for bit those of an uninterrupted run; OMP_NUM_THREADS sets the number'
            )
        backends = saved.get('backends', now['backends'])
        if backends != now['backends']:
            warn(
                f'the checkpoint was written with AFT_MM_BACKEND={backends!r} and the run resumes '
                f'with {now["backends"]!r}: sums are rounded differently, so the weights will not '
                'be bit for bit those of an uninterrupted run'
            )
        if done >= end:
            warn(
                f'the run is finished ({unit} {done} of {end}): nothing is left to train; a '
                f'longer one needs a larger train_cfg.max_{unit.removesuffix("ation")}s'
            )


def _check_numbers(meta: dict) -> None:
    inside = meta.get(INSIDE_EPOCH, {'num_done': 0})
    seconds = meta.get(TIME_BUDGET, {}).get('seconds', 0.0)
    counts = [meta.get('epoch'), meta.get('iter'), meta.get('seed') or 0]
    counts += [inside.get('num_done'), inside.get('sampler_seed') or 0]
    if not all(type(count) is int and 0 <= count < 2**63 for count in counts) or not (
        isinstance(seconds, int | float) and 0 <= seconds < math.inf
    ):
        raise UserError(
            'meta of the checkpoint must count epochs, iterations and seconds, got '
            f'{ {key: meta.get(key) for key in ("epoch", "iter", "seed")}!r:.200}'
        )


def _check_optimizer(runner: Runner, state: Any, name: str | None) -> None:
    groups = state.get('param_groups') if isinstance(state, dict) else None
    if not isinstance(groups, list) or not isinstance(state.get('state'), dict):
        return  # several optimizers, which mmengine compares by name
    optimizer = runner.optim_wrapper.optimizer
    own_name = type(optimizer).__name__
    own = optimizer.param_groups
    if (name or own_name) != own_name or _settings(groups) != _settings(own):
        raise UserError(
            f'the checkpoint holds the state of {name or "another optimizer"}, but the run has '
            f'{own_name}; resume with the previous optimizer, or start a new run with '
            'load_from=CHECKPOINT and without --resume'
        )
    sizes = [[len(group['params']) for group in part] for part in (groups, own)]
    if sizes[0] != sizes[1]:
        raise UserError(
            f'the optimizer of the checkpoint has groups of {sizes[0]} parameters, but that of the '
            f'run has groups of {sizes[1]}; resume with the previous paramwise_cfg '
            'and frozen parameters'
        )
    for saved, group in zip(groups, own, strict=True):
        _check_types('the optimizer', saved, group)
    parameters = [parameter for group in own for parameter in group['params']]
    indices = [index for group in groups for index in group['params']]
    for index, parameter in zip(indices, parameters, strict=True):
        for key, value in state['state'].get(index, {}).items():
            shape = getattr(value, 'shape', ())
            if math.prod(shape) != 1 and shape != parameter.shape and key != 'step':
                raise UserError(
                    f'{key} of the optimizer of the checkpoint is of shape {list(shape)}, but its '
                    f'parameter is of {list(parameter.shape)}'
                )


def _settings(groups: list[dict]) -> set[str]:
    return set.intersection(*map(set, groups)) - _NEW_SETTINGS if groups else set()


def _check_schedules(runner: Runner, checkpoint: dict) -> None:
    """Refuse other schedules, whose state mmengine would partly ignore."""
    saved, own = checkpoint.get('param_schedulers', []), runner.param_schedulers or []
    if not (isinstance(saved, list) and isinstance(own, list)):
        return
    states = [schedule.state_dict() for schedule in own]
    if [set(one) for one in saved] != [set(one) for one in states]:
        raise UserError(
            f'the checkpoint holds the state of {len(saved)} schedules, which are not of the kinds '
            f'of the {len(own)} of param_scheduler; resume with the previous ones'
        )
    for one, state in zip(saved, states, strict=True):
        _check_types('a schedule', one, state)


def _check_types(owner: str, saved: dict, own: dict) -> None:
    for key, value in own.items():
        if isinstance(value, int | float) and not isinstance(
            saved.get(key, value), int | float | Tensor | None
        ):
            raise UserError(
                f'{key} of {owner} in the checkpoint must be a number, got {saved[key]!r:.100}'
            )


@HOOKS.register_module()
class ValidateFirstHook(Hook):
    """Run the validation that follows the checkpoint from which a run resumes.

    mmengine saves an epoch before it validates it; a run resumed in between would skip the metrics,
    the best weights and the step of ``ReduceOnPlateauLR``.
    """

    priority = 'LOWEST'  # after the checks of a resume and StopHook's position

    def __init__(self) -> None:
        self.is_validating = False
        self.is_validated = False

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.is_validated = bool(checkpoint.get('meta', {}).get(VALIDATED))

    def before_train(self, runner: Runner) -> None:
        """Validate, if an uninterrupted run would next."""
        loop = runner.train_loop
        if isinstance(loop, EpochBasedTrainLoop):
            done, end = 0 if getattr(loop, 'num_done', 0) else loop.epoch, loop.max_epochs
        elif isinstance(loop, IterBasedTrainLoop):
            done, end = loop.iter, loop.max_iters
        else:
            return
        if not done or self.is_validated or runner.val_loop is None:
            return
        loop._decide_current_val_interval()
        if done >= loop.val_begin and (done % loop.val_interval == 0 or done == end):
            runner.val_loop.run()

    def before_val(self, runner: Runner) -> None:
        self.is_validating = True

    def after_val(self, runner: Runner) -> None:
        self.is_validating = False

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        checkpoint['meta'][VALIDATED] = self.is_validating
