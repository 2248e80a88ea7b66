"""Stop a run on a signal with a checkpoint, and on a failure of the machine with one line."""

import argparse
import errno
import logging
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from mmengine.dist import all_reduce
from mmengine.runner import Runner
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from aft_mm.errors import PEER_DIED, UserError

from .hooks.checkpointing import StopHook
from .stop_signals import Stopped, StopSignals, protect_workers

#: ``extra`` of a message for the log file only.
FILE_ONLY = dict(file_only=True)
ENOUGH_FILES = 65536
#: File in a work dir that names and locks the training there.
LOCK = '.lock'
_UNWRITABLE = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOENT,
    errno.ENOTDIR,
}
_PEER_GONE = re.compile(
    'Connection (closed|reset)|Broken pipe|Socket closed|ncclRemoteError|ncclSystemError',
    re.IGNORECASE,
)


class StopSignalHook(StopHook):
    """Ends the training after the iteration in which SIGTERM, SIGINT, SIGHUP or SIGUSR1 arrived.

    A signal to one process stops all. A validation is stopped after the batch.

    Args:
        command: The command that resumes the run, for the message.
    """

    def __init__(self, signals: StopSignals, command: str = 'train with --resume') -> None:
        super().__init__()
        self.command = command
        self.signals = signals
        self.message = ''

    def before_train(self, runner: Runner) -> None:
        super().before_train(runner)
        for loop in (runner.train_loop, runner.val_loop):
            if loop is not None:
                protect_workers(loop.dataloader)
        self.signals.patient = runner.distributed
        self.signals.can_wait = True

    def after_val_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.after_val(runner)

    def after_val(self, runner: Runner) -> None:
        # A stop that came in training may wait for an optimizer step of the next epoch.
        if self.signals.received and not self.is_up:
            self.signals.can_wait = False
            raise Stopped(self.signals.received)

    def after_train(self, runner: Runner) -> None:
        self.signals.can_wait = False

    def is_time(self, runner: Runner) -> bool:
        received = torch.tensor(self.signals.received or 0)
        if runner.distributed:
            all_reduce(received, 'max')
        self.signals.received = int(received) or None
        return self.signals.received is not None

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        if self.is_up and runner.train_loop.stop_training:
            runner.train_loop.val_begin = runner.max_iters + 1

    def announce(self, runner: Runner, iteration: int, checkpoint: str) -> None:
        name = signal.Signals(self.signals.received or signal.SIGTERM).name
        self.message = (
            f'{name} stopped the run after iteration {iteration}; the checkpoint is '
            f'{checkpoint}; to resume, {self.command}'
        )
        runner.logger.info(self.message, extra=FILE_ONLY)


class Run:
    def __init__(self, argv: Sequence[str]) -> None:
        self.signals = StopSignals(lambda signum: _report(self.stop_message(signum)))
        self.argv = argv
        self.runner: Runner | None = None
        self.hook: StopSignalHook | None = None
        self.lock: TextIO | None = None

    def claim(self, work_dir: str, launcher: str) -> None:
        """Refuse a work dir in which another training runs; the lock ends with the process."""
        # On GPUs the processes join later, so mmengine.dist does not know the first one yet.
        if launcher != 'none' and os.environ.get('RANK', '0') != '0':
            return
        if sys.platform == 'win32':
            return
        import fcntl

        with suppress(OSError):  # an unwritable folder is refused later; some systems have no locks
            Path(work_dir).mkdir(parents=True, exist_ok=True)
            self.lock = Path(work_dir, LOCK).open('a+')
            try:
                fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                self.lock.seek(0)
                raise UserError(
                    f'work_dir {work_dir!r} is in use by another training '
                    f'({self.lock.read(200).strip()}); name another --work-dir'
                ) from None
            self.lock.truncate(0)
            # Unbuffered, as closing the file would raise on a full disk.
            os.write(
                self.lock.fileno(), f'process {os.getpid()} on {socket.gethostname()}'.encode()
            )

    def release(self) -> None:
        if self.lock is not None:
            self.lock.close()

    def watch(self, runner: Runner) -> None:
        self.runner = runner
        self.hook = StopSignalHook(self.signals, self.command())
        runner.register_hook(self.hook)

    def stop_message(self, signum: int) -> str:
        return f'{signal.Signals(signum).name} stopped the run{self.last_checkpoint()}'

    def last_checkpoint(self) -> str:
        if self.runner is None or self.hook is None:
            return ''
        last = self.runner.message_hub.get_info('last_ckpt')
        if not last:
            return '; there is no checkpoint yet'
        return f'; the last checkpoint is {last}; to resume, {self.command()}'

    def command(self) -> str:
        if self.runner is not None and self.runner.distributed:
            return 'start it again with --resume'  # the launcher's arguments are not known here
        return (
            f'run: {shlex.join([*_program(), *without_options(self.argv, "--resume"), "--resume"])}'
        )


def _program() -> list[str]:
    path = Path(sys.argv[0])
    if path.stem == 'aft_mm':  # aft_mm.exe on Windows
        return ['aft_mm', 'train']
    if path.parts[-2:] == ('aft_mm', '__main__.py'):
        return ['python', '-m', 'aft_mm', 'train']
    return ['python', str(path) if path.name == 'train.py' else 'tools/train.py']


def without_options(argv: Sequence[str], *options: str) -> list[str]:
    """Return the words of a command without these options and their value, if they have one."""
    parser = argparse.ArgumentParser(add_help=False)
    for option in options:
        parser.add_argument(option, nargs='?')
    return parser.parse_known_args(argv)[1]


@contextmanager
def run_guard(argv: Sequence[str] | None = None) -> Iterator[Run]:
    """Exit with a one-line message if the machine or another process ends a run.

    That is a signal (exit status 128 plus its number), a killed worker, no memory, an unwritable
    disk, or the death of another process.

    Args:
        argv: Arguments of the command that resumes the training; by default those of the process.
    """
    _allow_many_open_files()
    run = Run(sys.argv[1:] if argv is None else argv)
    try:  # outside, as a worker's death is raised at any point
        with _quiet_log(), run.signals, _deaths_of_workers():
            yield run
            if run.hook is not None and run.hook.is_up:
                _end(run.hook.message, 128 + (run.signals.received or signal.SIGTERM))
    except Stopped as stopped:
        _end(run.stop_message(stopped.signum), 128 + stopped.signum)
    except SystemExit as end:  # raised by user_errors
        if isinstance(end.code, str):
            _report(end.code)
        raise
    except Exception as error:  # a bug is raised again, once its message is recorded
        message = reason(error)
        signum = run.signals.received
        if signum and message and message.startswith(('worker ', PEER_DIED)):
            # The signal also reached a worker before it was protected, or the other process.
            _end(run.stop_message(signum), 128 + signum)
        if message is None:
            _report(f'{type(error).__name__}: {" ".join(str(error).split()):.300}')
            raise
        _report(message + run.last_checkpoint())
        raise SystemExit(f'Error: {message}{run.last_checkpoint()}') from None
    finally:
        run.release()


def _allow_many_open_files() -> None:
    """Raise the limit on open files, or have workers send tensors by name if it stays low.

    By default torch keeps a file open for each tensor that a worker sends.
    """
    if sys.platform == 'win32':  # tensors are sent by name anyway
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    except (OSError, ValueError):  # macOS has a lower limit than it names
        limit = soft
    if limit < ENOUGH_FILES and 'file_system' in torch.multiprocessing.get_all_sharing_strategies():
        torch.multiprocessing.set_sharing_strategy('file_system')


@contextmanager
def _deaths_of_workers() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        if getattr(error, 'errno', None) not in _UNWRITABLE:
            time.sleep(1)  # SIGCHLD interrupts it
        raise


@contextmanager
def _quiet_log() -> Iterator[None]:
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before


def reason(error: Exception) -> str | None:
    """Describe a failure of the machine; return None for a possible bug."""
    message = ' '.join(str(error).split())
    out_of_memory = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if out_of_memory or "can't allocate memory" in message:
        return f'there is not enough memory ({message:.150}); a smaller batch needs less'
    if isinstance(error, OSError):
        if error.errno not in _UNWRITABLE:
            return None
        return f'{error.filename or "a file"!r} cannot be written or read: {error.strerror}'
    killed = re.search(r'DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (.+?)(?: It is|$)', message)
    if killed:
        return (
            f'worker {killed.group(1)} of a data loader {killed.group(2).rstrip(". ")}; the '
            'system does that when memory runs out'
        )
    if torch.distributed.is_initialized() and _PEER_GONE.search(message):
        return f'{PEER_DIED} ({message:.150})'
    return None


def _end(message: str, status: int) -> None:
    if message:
        print(_report(message), file=sys.stderr)
    raise SystemExit(status)


def _report(message: str) -> str:
    get_error_handler().record_exception(UserError(message.removeprefix('Error: ')))
    return message
