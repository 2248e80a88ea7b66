"""Hooks of the configs in this folder, which tests add to PYTHONPATH."""

import json
import os
import resource
import signal
import subprocess
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class RecordLossHook(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with open(Path(runner.work_dir, f'loss_{runner.rank}.jsonl'), 'a') as file:
            file.write(json.dumps([runner.iter, outputs['loss'].item()]) + '\n')


@HOOKS.register_module()
class KillHook(Hook):
    """Kill the process after iteration KILL_AFTER; with KILL_RANK only that of this rank."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        rank = os.environ.get('KILL_RANK', str(runner.rank))
        if os.environ.get('KILL_AFTER') == str(runner.iter) and rank == str(runner.rank):
            os.kill(os.getpid(), signal.SIGKILL)


@HOOKS.register_module()
class StopHere(Hook):
    """Stop the run at the moment STOP_AFTER, as STOP_BY says.

    7 is after iteration 7, counted from 1, and 6.5 is in the validation that follows iteration 6.
    STOP_BY is the name of a signal, with ``group`` to the process group with the data loader's
    workers, or ``disk``: the next checkpoint cannot be written. CHECKPOINTS=n also writes a
    checkpoint after every n iterations, as PeriodicCheckpointHook does by the clock.
    """

    priority = 'HIGHEST'

    def before_run(self, runner):
        if 'STOP_AFTER' in os.environ and os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)  # a signal to the group must not reach the tests
        every = int(os.environ.get('CHECKPOINTS', 0))
        for hook in runner.hooks:
            if every and type(hook).__name__ == 'PeriodicCheckpointHook':
                hook.is_time = lambda runner: (runner.iter + 1) % every == 0

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.stop_at(runner.iter + 1)

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if batch_idx == 0:
            self.stop_at(runner.iter + 0.5)

    def stop_at(self, moment):
        if os.environ.get('STOP_AFTER') != str(moment):
            return
        name, _, group = os.environ['STOP_BY'].partition(' ')
        if name == 'disk':
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            # The log may be in files, too.
            most = 5000 + max(os.fstat(file).st_size for file in (1, 2))
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        elif group:
            # From another process: workers end at SIGTERM of this one.
            words = ['kill', '-s', name.removeprefix('SIG'), '--', f'-{os.getpgid(0)}']
            subprocess.run(words, start_new_session=True, check=True)
        else:
            os.kill(os.getpid(), getattr(signal, name))
