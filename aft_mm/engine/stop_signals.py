"""SIGTERM and SIGINT as a wish to stop."""

import os
import signal
import threading
from types import FrameType

from torch.utils.data import get_worker_info

WATCHED = (signal.SIGTERM, signal.SIGINT)
_before_fork = threading.local()


def _hold_signals() -> None:
    _before_fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)


def _deliver_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _before_fork.mask)


def _end_at_sigterm() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(getattr(handler, '__self__', None), StopSignals):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _deliver_signals()


# The processes of a pool, such as evaluation makes, are ended by SIGTERM. A handler in Python may
# never see it: it is forgotten when a fork begins, and not looked at by one that just then goes to
# sleep until a lock is free. So the system holds signals back during a fork, and ends a child.
if hasattr(os, 'register_at_fork'):  # not on Windows
    os.register_at_fork(
        before=_hold_signals, after_in_parent=_deliver_signals, after_in_child=_end_at_sigterm
    )


class Stopped(BaseException):
    """A signal arrived where nothing can wait for the end of an iteration.

    Not an Exception, so that nobody takes it for an error that can be passed over.

    Args:
        signum: Number of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """What SIGTERM and SIGINT do in this process as long as the ``with`` block lasts.

    While ``can_wait``, the first one is kept in ``received``, for whoever looks there after an
    iteration, and a second one raises :class:`Stopped`; else the first one does. With ``patient``
    further ones are ignored while ``can_wait``: a launcher repeats what the keyboard sent to all.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.can_wait = False
        self.patient = False
        self._process = os.getpid()
        self._before: dict[int, object] = {}

    def __enter__(self) -> 'StopSignals':
        if threading.current_thread() is threading.main_thread():  # only there may one be set
            for signum in WATCHED:
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked from it, and the keyboard's SIGINT went to all
            # The worker of a data loader goes on until its parent has done.
            if get_worker_info() is None:
                signal.signal(signum, signal.SIG_DFL)
                os.kill(os.getpid(), signum)
            return
        first, self.received = self.received is None, self.received or signum
        if not (self.can_wait and (first or self.patient)):
            raise Stopped(signum)
