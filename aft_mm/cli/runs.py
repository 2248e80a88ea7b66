"""A run from its first line to its last, which says how it ended."""

import errno
import logging
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from mmengine.runner import Runner
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from aft_mm.engine import Stopped, StopSignalHook, StopSignals
from aft_mm.errors import PEER_DIED, UserError

# What the operating system says of a disk or a folder that can no longer be written.
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
# What gloo and NCCL say when a process that they talk to is gone.
_PEER_GONE = re.compile(
    'Connection (closed|reset)|Broken pipe|Socket closed|ncclRemoteError|ncclSystemError',
    re.IGNORECASE,
)


class Run:
    """A run of a tool: its signals, and its runner once that is built."""

    def __init__(self, signals: StopSignals, words: Sequence[str]) -> None:
        self.signals = signals
        self.words = words
        self.runner: Runner | None = None
        self.hook: StopSignalHook | None = None

    def watch(self, runner: Runner) -> None:
        """Let a signal stop the training of ``runner`` after an iteration."""
        self.runner = runner
        self.hook = StopSignalHook(self.signals, self.command())
        runner.register_hook(self.hook)

    def last_checkpoint(self) -> str:
        """``; the last checkpoint is work_dirs/a/epoch_3.pth; to go on, …``."""
        if self.runner is None or self.hook is None:  # no training
            return ''
        last = self.runner.message_hub.get_info('last_ckpt')
        if not last:
            return '; the last checkpoint is none yet'
        return f'; the last checkpoint is {last}; to go on, {self.command()}'

    def command(self) -> str:
        """What goes on with a training: the command that started it, with ``--resume``."""
        if self.runner is not None and self.runner.distributed:
            return 'start it again with --resume'  # the launcher's arguments are not known here
        return f'run: {shlex.join([*program(), *resuming(self.words)])}'


def program() -> list[str]:
    """How the training was started, without its arguments."""
    path = Path(sys.argv[0])
    if path.stem == 'aft_mm':  # aft_mm.exe on Windows
        return ['aft_mm', 'train']
    if path.parts[-2:] == ('aft_mm', '__main__.py'):
        return ['python', '-m', 'aft_mm', 'train']
    return ['python', str(path) if path.name == 'train.py' else 'tools/train.py']


def resuming(words: Sequence[str]) -> list[str]:
    """Arguments of a training with ``--resume`` at their end, and no other one."""
    kept: list[str] = []
    names_checkpoint = False
    for word in words:
        if not (word.startswith('--resume') or names_checkpoint and not word.startswith('-')):
            kept.append(word)
        names_checkpoint = word == '--resume'
    return [*kept, '--resume']


@contextmanager
def whole_run(argv: Sequence[str] | None = None) -> Iterator[Run]:
    """End with one sentence also where the machine or another process ends a run.

    That is a signal, a worker of a data loader that was killed, memory or a disk that is full, a
    folder that can no longer be written, and a process of a distributed run that is gone. The
    sentence names the last checkpoint, if it trains, and the exit status of a signal is that of the
    shell, 128 and its number. In a distributed run the launcher gets the sentence, too.

    Args:
        argv: The arguments of the program, those of the process if None; for the command that the
            sentence of a training names.
    """
    run = Run(StopSignals(), sys.argv[1:] if argv is None else argv)
    try:  # around the signals, too: the death of a worker is raised wherever Python is just then
        with _quiet_log(), run.signals, _deaths_of_workers():
            yield run
            if run.hook is not None and run.hook.is_up:
                _end(run.hook.sentence, 128 + (run.signals.received or signal.SIGTERM))
    except Stopped as stopped:
        _end(f'{stopped} stopped the run{run.last_checkpoint()}', 128 + stopped.signum)
    except SystemExit as end:  # of one_sentence
        if isinstance(end.code, str):
            _report(end.code)
        raise
    except (OSError, RuntimeError, MemoryError) as error:
        sentence = reason(error)
        if sentence is None:
            raise
        _report(sentence + run.last_checkpoint())
        raise SystemExit(f'Error: {sentence}{run.last_checkpoint()}') from None


@contextmanager
def _deaths_of_workers() -> Iterator[None]:
    """Raise the death of a data loader's worker in place of the connection that it closed.

    Its end closes the connection a moment before the signal SIGCHLD comes, for which torch raises a
    RuntimeError that says what happened.
    """
    try:
        yield
    except (OSError, EOFError) as error:
        if getattr(error, 'errno', None) not in _UNWRITABLE:
            time.sleep(1)  # a signal ends it
        raise


@contextmanager
def _quiet_log() -> Iterator[None]:
    """A log that cannot be written prints no traceback for each of its lines."""
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before


def reason(error: Exception) -> str | None:
    """What the machine did to a run, in a few words; None for what may be a bug."""
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
            'system does that where memory runs out'
        )
    if torch.distributed.is_initialized() and _PEER_GONE.search(message):
        return f'{PEER_DIED} ({message:.150})'
    return None


def _end(sentence: str, status: int) -> None:
    """Print the last line, if this process has one, and end."""
    if sentence:
        _report(sentence)
        print(sentence, file=sys.stderr)
    raise SystemExit(status)


def _report(sentence: str) -> None:
    """Let torchrun, if there is one, know why this process ends."""
    get_error_handler().record_exception(UserError(sentence.removeprefix('Error: ')))
