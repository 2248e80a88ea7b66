"""Write checkpoints safely, also at a stop or by the clock, and check those that are loaded."""

import inspect
import logging
import math
import os
from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from mmengine.dist import all_gather_object, broadcast, is_main_process
from mmengine.hooks import CheckpointHook, Hook
from mmengine.optim import OptimWrapper
from mmengine.runner import IterBasedTrainLoop, Runner
from torch import Tensor

from aft_mm.checkpoint import (
    ATOMIC_BACKEND,
    CONFIG_TEXT,
    disown_checkpoints,
    load_weights,
    plain_hub,
    plain_value,
    remove_parts,
    write_pointer,
)
from aft_mm.checks import check_int, check_number
from aft_mm.config.texts import nfc
from aft_mm.config.trained import warn_of_other_options
from aft_mm.errors import UserError
from aft_mm.registry import HOOKS
from aft_mm.structures import BEST_SCORE

from ..loops import StoppableEpochLoop, make_resumable, sampler_of
from ..runner import task_model, wrappers_of

#: Entry of a checkpoint's meta with the position inside an epoch.
INSIDE_EPOCH = 'inside_epoch'
#: Entry of a checkpoint's meta with the time used.
TIME_BUDGET = 'time_budget'


class StopHook(Hook):
    """Ends the training when :meth:`is_time` returns True, with a checkpoint to resume from.

    A run by epochs resumes with the remaining batches of the epoch in the same order.
    """

    priority = 'LOWEST'  # after the schedulers and CheckpointHook

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.is_up = False
        self.saved = -1  # iterations done at the last checkpoint that can be resumed

    @abstractmethod
    def is_time(self, runner: Runner) -> bool:
        """Return whether to stop, the same in all processes; called after every iteration."""

    @abstractmethod
    def announce(self, runner: Runner, iteration: int, checkpoint: str) -> None:
        pass

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.loaded = checkpoint.get('meta', {})

    def before_train(self, runner: Runner) -> None:
        loop = runner.train_loop
        make_resumable(loop)
        if not runner.iter:  # 0 if only weights were loaded
            return
        inside = self.loaded.get(INSIDE_EPOCH, {})
        if inside.get('num_done'):
            _resume_inside_epoch(loop, **inside)
        if inside.get('sampler_seed') is not None:  # without a fixed seed runs differ
            sampler_of(loop.dataloader).seed = inside['sampler_seed']

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        self.is_up = self.is_up or self.is_time(runner)
        # A checkpoint between two steps would also hold gradients.
        if not self.is_up or is_between_steps(runner) or self.is_last_train_iter(runner):
            return
        runner.train_loop.stop_training = True
        if self.can_save(runner, batch_idx):
            self._save(runner, runner.epoch, runner.iter + 1)

    def can_save(self, runner: Runner, batch_idx: int) -> bool:
        """Return whether a checkpoint here can be resumed; at an epoch's end it comes later."""
        loop = runner.train_loop
        return isinstance(loop, IterBasedTrainLoop) or (
            isinstance(loop, StoppableEpochLoop)
            and not self.end_of_epoch(loop.dataloader, batch_idx)
        )

    def after_train_epoch(self, runner: Runner) -> None:
        loop = runner.train_loop
        if self.is_up and loop.stop_training and not isinstance(loop, IterBasedTrainLoop):
            self._save(runner, runner.epoch + 1, runner.iter)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        loop, meta = runner.train_loop, checkpoint['meta']
        inside = isinstance(loop, StoppableEpochLoop)
        meta[INSIDE_EPOCH] = dict(
            num_done=loop.num_done_at(meta['epoch'], meta['iter']) if inside else 0,
            epoch_length=len(loop.dataloader),
            sampler_seed=getattr(sampler_of(loop.dataloader), 'seed', None),
        )
        if 'optimizer' in checkpoint:  # the best weights are saved without
            self.saved = meta['iter']

    def _save(self, runner: Runner, epoch: int, iteration: int) -> None:
        if runner.rank:
            return
        hub = runner.message_hub
        if self.saved != iteration:
            path = Path(runner.work_dir, f'iter_{iteration}.pth')
            options = dict(meta=dict(epoch=epoch, iter=iteration), backend_args=ATOMIC_BACKEND)
            runner.save_checkpoint(runner.work_dir, path.name, **options)
            hub.update_info('last_ckpt', str(path))
            write_pointer(runner.work_dir, str(path))
        self.announce(runner, iteration, hub.get_info('last_ckpt'))


def _resume_inside_epoch(
    loop: StoppableEpochLoop, num_done: int, epoch_length: int, **others: Any
) -> None:
    if len(loop.dataloader) != epoch_length:
        raise UserError(
            f'the checkpoint was written after {num_done} of the {epoch_length} iterations of an '
            f'epoch, but an epoch of this run has {len(loop.dataloader)}; resume with the '
            'previous batch size, data and number of processes'
        )
    loop.num_done = num_done


@HOOKS.register_module()
class TimeBudgetHook(StopHook):
    """End the training after ``days`` + ``hours`` + ``minutes``, with a checkpoint to resume from.

    The time counts from the first batch on, with validation and checkpoints, over all resumed runs.
    A run by epochs stops inside the epoch without validation and resumes there, with the same batch
    size and number of processes.

    Args:
        days, hours, minutes: Parts of the budget.
        interval: Iterations between two checks of the clock, by which the run may exceed the
            budget.

    Raises:
        ValueError: The budget is not positive and finite, or ``interval`` is below 1.
    """

    def __init__(
        self, days: float = 0, hours: float = 0, minutes: float = 0, interval: int = 10
    ) -> None:
        for name, value in dict(days=days, hours=hours, minutes=minutes).items():
            check_number(f'{name} of TimeBudgetHook', value, 0)
        seconds = 86400.0 * days + 3600.0 * hours + 60.0 * minutes
        check_number('the time of TimeBudgetHook in seconds', seconds, above=0)
        check_int('interval of TimeBudgetHook', interval, 1)
        super().__init__()
        self.budget = seconds
        self.interval = interval
        self.used_before = 0.0
        self.start = 0.0

    def before_train(self, runner: Runner) -> None:
        self.start = monotonic()
        before = self.loaded.get(TIME_BUDGET)
        if runner.iter and before:  # else nothing or a run without a budget is resumed
            self.used_before = before['seconds']
            if self.used_before >= self.budget and runner.iter < runner.max_iters:
                raise UserError(
                    f'the time budget of {_duration(self.budget)} is used up, as the run took '
                    f'{_duration(self.used_before)} so far; to resume, give TimeBudgetHook more'
                )
        super().before_train(runner)

    def is_time(self, runner: Runner) -> bool:
        return self.every_n_train_iters(runner, self.interval) and agreed(
            self.used() >= self.budget
        )

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        super().before_save_checkpoint(runner, checkpoint)
        checkpoint['meta'][TIME_BUDGET] = dict(seconds=self.used())

    def used(self) -> float:
        return self.used_before + monotonic() - self.start

    def announce(self, runner: Runner, iteration: int, checkpoint: str) -> None:
        runner.logger.info(
            f'The time budget of {_duration(self.budget)} is used up: {_duration(self.used())} at '
            f'iteration {iteration}; the checkpoint is {checkpoint}; to resume, give '
            'TimeBudgetHook more and train with --resume'
        )


def agreed(decision: bool) -> bool:
    """Return the decision of the first process in all processes."""
    decided = torch.tensor(decision, dtype=torch.uint8)
    broadcast(decided)
    return bool(decided)


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


#: Entry of a checkpoint's meta: what a resume compares.
RUN = 'run'


def is_between_steps(runner: Runner) -> bool:
    """Return whether gradients of an optimizer wait for its next step."""
    wrappers = wrappers_of(runner.optim_wrapper).values()
    return any(isinstance(one, OptimWrapper) and not one.should_update() for one in wrappers)


def waiting_gradients(runner: Runner) -> list[dict[str, Tensor]]:
    # The loss of one of several optimizers may give gradients to the next step of another.
    if len(wrappers_of(runner.optim_wrapper)) == 1 and not is_between_steps(runner):
        return []
    gradients = {
        name: parameter.grad.cpu()
        for name, parameter in task_model(runner).named_parameters()
        if parameter.grad is not None
    }
    return all_gather_object(gradients)


#: Parts of the names of metrics whose lower or larger values are better.
LESS = 'bits_per_', 'perplexity_per_', 'error_rate', 'consistency_mse', 'lpips'
GREATER = 'percent_correct', 'bleu', '_psnr_db', '_ssim'


@HOOKS.register_module()
class SafeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook, robust against crashes and foreign checkpoints.

    - Files are replaced atomically, and a checkpoint is readable with ``weights_only=True``.
    - A resumed run removes only files of its own folder with the names of a run, and warns about
      others. In a copied or renamed folder these are the copies. The best score counts with its
      file and for its metric only.
    - A new run in a used folder is not resumed from the checkpoints of the earlier one.
    - ``save_best='auto'`` knows which values of the metrics of aft_mm are better.

    Args:
        **kwargs: Those of :class:`mmengine.hooks.CheckpointHook`.

    Raises:
        UserError: An argument is not one of them.
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault('less_keys', (*self._default_less_keys, *LESS))
        kwargs.setdefault('greater_keys', (*self._default_greater_keys, *GREATER))
        elsewhere = '://' in str(kwargs.get('out_dir')) or kwargs.get('file_client_args')
        if not elsewhere and not kwargs.get('backend_args'):
            kwargs['backend_args'] = ATOMIC_BACKEND
        super().__init__(**kwargs)
        self.is_new = False
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
            self.is_new = not runner.iter
        info = runner.message_hub.runtime_info
        self._adopt_best(info, folder, runner)
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
        runner.logger.addFilter(_is_no_own_deprecation)
        super().before_train(runner)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if self.is_new:
            self.is_new = False
            disown_checkpoints(runner.work_dir)
        super().after_train_iter(runner, batch_idx, data_batch, outputs)

    def _adopt_best(self, info: dict, folder: Path, runner: Runner) -> None:
        """Find the best checkpoints of a copied folder, and forget the scores of others."""
        if '://' in str(self.out_dir):
            return
        for key in [key for key in info if key.startswith('best_ckpt')]:
            if not isinstance(info[key], str):
                continue
            name = os.path.basename(info[key])
            here = os.path.join(folder, name)
            if self._is_of(folder, runner) and os.path.isfile(here):
                info[key] = here
            metric = key.removeprefix('best_ckpt').removeprefix('_')
            metric = metric or (self.key_indicators[0] if self.save_best else 'auto')
            if metric != 'auto' and not name.startswith(f'best_{metric.replace("/", "_")}_'):
                runner.logger.warning(
                    f'save_best is {metric} now: the best score of the checkpoint is of '
                    f'{name:.100}, which stays, and does not count'
                )
                del info[key]
            elif Path(info[key]).parent.resolve() == folder.resolve():
                if os.path.isfile(here):
                    continue
                del info[key]
            info.pop(key.replace('best_ckpt', 'best_score'), None)

    def _is_of(self, folder: Path, runner: Runner) -> bool:
        """Return whether the run resumes from a checkpoint in this folder or its work dir."""
        loaded = runner.cfg.get('load_from')
        own = [place.resolve() for place in (folder, Path(runner.work_dir))]
        return not loaded or Path(loaded).expanduser().resolve().parent in own

    def _foreign(self, key: str, value: Any, folder: Path, runner: Runner) -> str:
        if key.startswith('best_score'):
            if isinstance(value, Tensor | np.generic) and math.prod(value.shape) == 1:
                value = value.item()
            is_number = isinstance(value, Real) and not math.isnan(value)
            return '' if is_number else 'is not a number'
        if key == 'keep_ckpt_ids':
            if not self._is_of(folder, runner):
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
        chosen = [next(iter(metrics)) if key == 'auto' else key for key in self.key_indicators]
        for key in chosen:
            value = metrics[key]
            size = value.numel() if isinstance(value, Tensor) else np.size(value)
            if isinstance(value, dict | str) or size != 1:
                raise UserError(
                    'save_best of the checkpoint hook must be a metric with one value, got '
                    f'{key!r} with {value!r:.80}; name another'
                )
        if 'auto' in self.key_indicators:
            try:
                self._init_rule(self.rules, chosen)
            except ValueError as error:
                raise UserError(
                    "save_best='auto' of the checkpoint hook must find a metric whose better values "
                    f"are known, got {chosen[0]!r}; name one, with rule='less' or rule='greater'"
                ) from error
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


def _is_no_own_deprecation(record: logging.LogRecord) -> bool:
    # mmengine uses these itself when it saves.
    return not record.getMessage().startswith(('"FileClient" will be', '"HardDiskBackend" is'))


def run_properties(runner: Runner) -> dict[str, Any]:
    """Return what the bits of a run depend on, for the meta of its checkpoints."""
    loader = runner.train_dataloader
    batches = getattr(loader, 'batch_sampler', None)
    return dict(
        num_processes=runner.world_size,
        num_threads=torch.get_num_threads(),
        backends=os.environ.get('AFT_MM_BACKEND', ''),
        batch_size=getattr(loader, 'batch_size', None) or getattr(batches, 'batch_size', None),
        workers=loader.num_workers > 0,
        optimizer=', '.join(
            type(wrapper.optimizer).__name__
            for wrapper in wrappers_of(runner.optim_wrapper).values()
        ),
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
        if self.is_up and not is_between_steps(runner) and self.can_save(runner, batch_idx):
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
        strict: True requires exactly the tensors of the model, and the same classes, units or
            subwords; False allows what the model's loading allows.
        resume: Also refuse interpolated position biases, which do not fit the optimizer state.
    """

    priority = 'VERY_HIGH'

    def __init__(self, strict: bool = True, resume: bool = False) -> None:
        self.strict = strict
        self.resume = resume

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        saved = checkpoint.get('meta', {}).get('dataset_meta')
        if self.strict and saved:
            loop = runner.train_loop if self.resume else runner.test_loop
            _check_labels(saved, infos_of(loop.dataloader.dataset)[0])
        if CONFIG_TEXT in checkpoint.get('meta', {}):
            trained = checkpoint['meta'][CONFIG_TEXT]
            # A start may have another head.
            warn_of_other_options(runner.cfg, trained, '' if self.strict else 'token_mixer')
        resized = load_weights(task_model(runner), checkpoint, runner.experiment_name, self.strict)
        if resized and self.resume:
            raise UserError(
                f'a run cannot be resumed with {resized[0]} of another size, to which '
                'the state of the optimizer does not fit; start a new one with '
                'load_from=CHECKPOINT and without --resume'
            )


def _check_labels(saved: dict, current: dict) -> None:
    subwords = saved.get('subwords')
    if subwords not in (None, current.get('subwords')):
        raise UserError(
            f'the checkpoint was trained with subwords of fingerprint {subwords}, but '
            f'those of the data have {current.get("subwords")}; use the previous subwords file'
        )
    for kind in ('classes', 'units'):
        trained, given = (labels(meta.get(kind)) for meta in (saved, current))
        if trained and given and trained != given:
            raise UserError(
                f'the checkpoint was trained with {len(trained)} {kind} and the data have '
                f'{len(given)}, which must be the same in the same order: '
                f'{difference(trained, given)}; {kind} of the data set can name them'
            )


def infos_of(dataset: Any) -> list[dict]:
    """Return the metainfo of a data set, and of those that it joins, at least one.

    That of mmdet's ConcatDataset may be a list; it is left out.
    """
    parts = (dataset, *(getattr(dataset, 'datasets', None) or ()))
    infos = [getattr(part, 'metainfo', None) for part in parts]
    return [info for info in infos if isinstance(info, dict)] or [{}]


def labels(names: Any) -> list[str]:
    return [nfc(str(name)) for name in names] if isinstance(names, list | tuple) else []


def difference(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Say how two lists of classes differ."""
    differing = sorted({*ours} ^ {*theirs})
    if not differing:
        return 'their order differs'
    shown = ', '.join(f'{name!r:.40}' for name in differing[:3])
    return f'{shown} {"is" if len(differing) == 1 else "are"} in one only'
