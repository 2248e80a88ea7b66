"""Hooks of the configs in this folder, which tests add to PYTHONPATH."""

import json
import os
import signal
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class RecordLossHook(Hook):
    """Write the loss of every iteration of every rank, one JSON line each."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with open(Path(runner.work_dir, f'loss_{runner.rank}.jsonl'), 'a') as file:
            file.write(json.dumps([runner.iter, outputs['loss'].item()]) + '\n')


@HOOKS.register_module()
class KillHook(Hook):
    """Kill the process after iteration KILL_AFTER, or while the checkpoint of epoch KILL_SAVING is
    written; with KILL_RANK only the process of this rank.
    """

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        rank = os.environ.get('KILL_RANK', str(runner.rank))
        if os.environ.get('KILL_AFTER') == str(runner.iter) and rank == str(runner.rank):
            os.kill(os.getpid(), signal.SIGKILL)

    def before_save_checkpoint(self, runner, checkpoint):
        if os.environ.get('KILL_SAVING') == str(runner.epoch + 1):
            Path(runner.work_dir, f'epoch_{runner.epoch + 1}.pth').write_bytes(bytes(1000))
            os.kill(os.getpid(), signal.SIGKILL)
