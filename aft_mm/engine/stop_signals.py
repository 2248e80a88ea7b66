"""Signals that stop a run, in its main process and its workers."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

import torch
from torch.utils.data import DataLoader, get_worker_info

# Those that Windows has not are left out; SLURM is often asked for SIGUSR1 before the time limit.
_OPTIONAL = tuple(getattr(signal, name) for name in ('SIGHUP', 'SIGUSR1') if hasattr(signal, name))
WATCHED = (signal.SIGTERM, signal.SIGINT, *_OPTIONAL)
_before_fork = threading.local()
_is_starting_workers = False


def _hold_signals() -> None:
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def _deliver_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _end_at_sigterm() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(getattr(handler, '__self__', None), StopSignals):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not _is_starting_workers:  # else WorkerInit handles them
        _deliver_signals()


# Pools end their processes with SIGTERM, where a Python handler may never run. So signals are
# blocked during a fork, and SIGTERM ends a child.
if hasattr(os, 'register_at_fork'):  # not on Windows
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_deliver_signals, after_in_child=_end_at_sigterm
    )


class WorkerInit:
    """``worker_init_fn`` of a data loader whose workers survive a signal to the process group."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self.init = init
        self.strategy = torch.multiprocessing.get_sharing_strategy()

    def __call__(self, worker_id: int) -> None:
        torch.multiprocessing.set_sharing_strategy(self.strategy)  # a spawned worker has another
        if hasattr(signal, 'sigwaitinfo'):  # not on Windows and macOS
            # Only the new thread receives them.
            signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
            threading.Thread(target=_end_with_parent, daemon=True).start()
        if self.init is not None:
            self.init(worker_id)


def _end_with_parent() -> None:
    while True:
        received = signal.sigwaitinfo(WATCHED)
        if received.si_signo == signal.SIGTERM and received.si_pid == os.getppid():
            os._exit(0)


def protect_workers(loader: DataLoader) -> None:
    if loader.num_workers and not isinstance(loader.worker_init_fn, WorkerInit):
        loader.worker_init_fn = WorkerInit(loader.worker_init_fn)


@contextmanager
def starting_workers() -> Iterator[None]:
    """Block signals in processes forked inside, until their :class:`WorkerInit` runs."""
    global _is_starting_workers
    _is_starting_workers = True
    try:
        yield
    finally:
        _is_starting_workers = False


class Stopped(BaseException):
    """A signal stops a validation, between two batches or after the last one."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class StopSignals:
    """Context manager that handles SIGTERM, SIGINT, SIGHUP and SIGUSR1 of this process.

    While ``can_wait``, the first signal is stored in ``received``; otherwise, and for a second one,
    the process ends. With ``patient``, further ones are ignored while ``can_wait``, because a
    launcher repeats that of the keyboard.

    Args:
        message: Returns the last line of a process that a signal of this number ends.
    """

    def __init__(self, message: Callable[[int], str] = '{:d} stopped the run'.format) -> None:
        self.message = message
        self.received: int | None = None
        self.can_wait = False
        self.patient = False
        self._process = os.getpid()
        self._before: dict[int, object] = {}

    def __enter__(self) -> 'StopSignals':
        if threading.current_thread() is threading.main_thread():  # required by signal.signal
            for signum in WATCHED:
                # nohup ignores SIGHUP, and the user may handle SIGUSR1.
                if signum in _OPTIONAL and signal.getsignal(signum) is not signal.SIG_DFL:
                    continue
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork, which also got the keyboard's SIGINT
            # A data loader worker continues until its parent ends.
            if get_worker_info() is None:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        first, self.received = self.received is None, self.received or signum
        if not (self.can_wait and (first or self.patient)):
            self._end(signum)

    def _end(self, signum: int) -> NoReturn:
        """End the process without the cleanup of libraries, which may wait for others."""
        line = self.message(signum)
        with suppress(RuntimeError, OSError, ValueError):  # the signal may interrupt a print
            sys.stdout.flush()
        with suppress(RuntimeError, OSError, ValueError):
            print(line, file=sys.stderr, flush=True)
        os._exit(128 + signum)
