"""Checkpoints of a run that are whole, and a resume that touches nothing but its own."""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Any

import mmengine
import numpy as np
from mmengine.dist import is_main_process
from mmengine.fileio import LocalBackend, register_backend
from mmengine.hooks import CheckpointHook, EMAHook
from mmengine.runner import Runner
from torch import Tensor

from aft_mm.checkpoint import (
    plain_hub,
    plain_value,
    remove_parts,
    write_pointer,
    write_whole,
)
from aft_mm.registry import HOOKS

#: What :class:`SafeCheckpointHook` writes into the meta of a checkpoint.
RUN = 'run'
#: For ``backend_args`` of mmengine.
WHOLE_FILES = dict(backend='aft_mm.WholeFileBackend')


class WholeFileBackend(LocalBackend):
    """mmengine's local files, but each is written whole or not at all."""

    def put(self, obj: bytes, filepath: str | Path) -> None:
        """Write beside the file, then rename."""
        mmengine.mkdir_or_exist(os.path.dirname(filepath))
        with write_whole(filepath) as file:
            file.write(obj)


register_backend(WHOLE_FILES['backend'], WholeFileBackend, force=True)


@HOOKS.register_module()
class SafeCheckpointHook(CheckpointHook):
    """mmengine's CheckpointHook for machines that fail and for files of others.

    - A checkpoint and ``last_checkpoint`` are written whole or not at all, and an old checkpoint is
      removed when the new one is on the disk and named.
    - What is saved are tensors and Python's plain types, so that ``torch.load`` reads it with
      ``weights_only=True`` as it is. ``meta`` gets what a resume compares: the number of processes,
      the iterations of an epoch, the optimizer.
    - A checkpoint says which best weights and which old checkpoints to remove. Those are removed
      that are files of this run's own folder with the names that a run gives them; the rest is left
      alone, with a warning.

    Args:
        **kwargs: Those of :class:`mmengine.hooks.CheckpointHook`.
    """

    def __init__(self, **kwargs: Any) -> None:
        elsewhere = '://' in str(kwargs.get('out_dir')) or kwargs.get('file_client_args')
        if not elsewhere and not kwargs.get('backend_args'):
            kwargs['backend_args'] = WHOLE_FILES
        super().__init__(**kwargs)

    def before_train(self, runner: Runner) -> None:
        """Take from a resumed checkpoint what belongs to this run's folder."""
        own = Path(runner.work_dir)
        folder = own if self.out_dir in (None, runner.work_dir) else Path(self.out_dir, own.name)
        if is_main_process():
            remove_parts(folder)
        info = runner.message_hub.runtime_info
        for key in [key for key in info if key.startswith(('best_', 'keep_ckpt_ids', 'last_ckpt'))]:
            reason = self._foreign(key, info[key], folder, runner)
            if reason:
                if key != 'last_ckpt':  # which is only ever shown
                    runner.logger.warning(
                        f'{key} of the checkpoint, {info[key]!r:.200}, {reason} and is left alone'
                    )
                del info[key]
        names = {
            step: Path(folder, self.filename_tmpl.format(step))
            for step in info.get('keep_ckpt_ids', ())
        }
        if names:
            info['keep_ckpt_ids'] = [
                step for step, path in names.items() if path.is_file() and not path.is_symlink()
            ]
        with _without_own_deprecations(runner):
            super().before_train(runner)

    def _foreign(self, key: str, value: Any, folder: Path, runner: Runner) -> str:
        """Why what the checkpoint says under ``key`` is none of this run's; '' if it is."""
        if key.startswith('best_score'):
            if isinstance(value, Tensor | np.generic) and math.prod(value.shape) == 1:
                value = value.item()
            is_number = isinstance(value, Real) and not math.isnan(value)
            return '' if is_number else 'is no number'
        if key == 'keep_ckpt_ids':
            loaded = runner.cfg.get('load_from')
            if loaded and Path(loaded).expanduser().resolve().parent != folder.resolve():
                return 'is of a run in another folder'
            whole = isinstance(value, list) and all(type(i) is int and i >= 0 for i in value)
            return '' if whole else 'is no list of epochs or iterations'
        prefix = 'best_' if key.startswith('best_ckpt') else ''
        path = Path(value) if isinstance(value, str) else Path()
        if not (
            path.name.startswith(prefix)
            and path.suffix == '.pth'
            and path.parent.resolve() == folder.resolve()
        ):
            return "is no checkpoint of this run's folder"
        return 'is no file' if path.is_symlink() or path.is_dir() else ''

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Turn the training state into plain types and say what run it is of."""
        checkpoint['message_hub'] = plain_hub(checkpoint['message_hub'])
        checkpoint['meta'] = plain_value(checkpoint['meta'])
        for key in {'param_schedulers', 'optimizer'} & checkpoint.keys():
            checkpoint[key] = plain_value(checkpoint[key])
        checkpoint['meta'][RUN] = description(runner)

    def _save_checkpoint_with_step(self, runner: Runner, step: int, meta: dict) -> None:
        """mmengine's, in another order: write, name, then remove the oldest."""
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
                **self.args,
            )
        except BaseException:  # of a full disk, or a signal; it is the one before that is whole
            hub.update_info('last_ckpt', before)
            raise
        self.last_ckpt = path
        if is_main_process():
            write_pointer(runner.work_dir, path)
            if outdated is not None:
                old = self.file_backend.join_path(self.out_dir, self.filename_tmpl.format(outdated))
                if self.file_backend.isfile(old) and not os.path.islink(old):
                    self.file_backend.remove(old)


@contextmanager
def _without_own_deprecations(runner: Runner) -> Iterator[None]:
    """mmengine's CheckpointHook always makes a FileClient, which warns that it is deprecated."""

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(('"FileClient" will be', '"HardDiskBackend" is'))

    for handler in runner.logger.handlers:
        handler.addFilter(keep)
    try:
        yield
    finally:
        for handler in runner.logger.handlers:
            handler.removeFilter(keep)


def description(runner: Runner) -> dict[str, Any]:
    """What must be the same in a run that goes on from a checkpoint of this one."""
    return dict(
        num_processes=runner.world_size,
        epoch_length=len(runner.train_loop.dataloader),
        optimizer=type(getattr(runner.optim_wrapper, 'optimizer', runner.optim_wrapper)).__name__,
        averaged=any(isinstance(hook, EMAHook) for hook in runner.hooks),
    )
