"""A check in a process of its own, at most one at a time per verdict.

A kernel that reads where it must not ruins its process's CUDA context for good, and one that never
ends cannot be stopped from within: only another process can say so and fall back.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress

from . import verdicts
from .verdicts import PACKAGE, Subject, Verdict

# Seconds for all cases of an op and dtype, most of which go into compiling.
TIME_LIMIT = 900
# How much longer others wait for a check, and how long for the end of a process that was killed.
MARGIN, END = 60, 10
logger = logging.getLogger('aft_mm.ops')


class NotCheckedError(RuntimeError):
    """There is no verdict, for a reason that lies with the machine and not with the kernels."""


def find(subject: Subject, why_not_made: str | None) -> Verdict:
    """The verdict on disk or else a new one, unless there is a reason against making one.

    Raises :class:`NotCheckedError`.
    """
    try:
        verdict = verdicts.load(subject)
    except (OSError, ValueError) as error:
        verdict = None
        why_not_made = why_not_made and f'{error}, and {why_not_made}'
    if verdict is None and why_not_made:
        raise NotCheckedError(why_not_made)
    return verdict or make(subject, anew=False)


def make(subject: Subject, anew: bool = True) -> Verdict:
    """Run the check and keep its verdict, unless another process has just done so or `anew`.

    Raises :class:`NotCheckedError`.
    """
    try:
        with _alone(subject):
            verdict = None if anew else _on_disk(subject)
            if verdict is None:
                logger.warning('checking the Triton kernels of %s once, for up to minutes', subject)
                verdict = check(subject)
                verdicts.save(subject, verdict)
            return verdict
    except OSError as error:
        raise NotCheckedError(
            f'{verdicts.folder()} cannot keep a verdict ({error.strerror}); let XDG_CACHE_HOME '
            f'name a folder that can be written to'
        ) from None


def _on_disk(subject: Subject) -> Verdict | None:
    # A file that holds no verdict is written anew.
    with suppress(ValueError):
        return verdicts.load(subject)
    return None


@contextmanager
def _alone(subject: Subject):
    """One process at a time; the system frees the lock of one that dies."""
    # A package that torch needs itself. `fcntl.flock`, on which it rests, would wait for ever. It
    # is imported here because a process that finds its verdicts never gets here.
    from filelock import FileLock, Timeout

    verdicts.folder().mkdir(parents=True, exist_ok=True)
    lock = FileLock(verdicts.path_of(subject).with_suffix('.lock'))
    wait = TIME_LIMIT + MARGIN
    try:
        lock.acquire(timeout=wait)
    except Timeout:
        raise NotCheckedError(
            f'another process has not ended its check in {wait} seconds'
        ) from None
    try:
        yield
    finally:
        lock.release()


def check(subject: Subject) -> Verdict:
    """What `judge.py` finds in a process of its own; raises :class:`NotCheckedError`."""
    command = [sys.executable, '-W', 'ignore', '-m', f'{__package__}.judge']
    command += [subject.op, subject.device, subject.dtype, str(TIME_LIMIT + MARGIN)]
    # The modules of this process, wherever it found them.
    paths = [os.path.abspath(path) for path in sys.path]
    # Files, not pipes: they can be read whether or not the process ended.
    with tempfile.TemporaryFile('w+') as output, tempfile.TemporaryFile('w+') as errors:
        try:
            process = subprocess.Popen(
                command,
                cwd=PACKAGE.parents[1],
                env={**os.environ, 'PYTHONPATH': os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            raise NotCheckedError(f'the check could not be made: {error.strerror}') from None
        try:
            code = process.wait(TIME_LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                _end(process)
        output.seek(0)
        errors.seek(0)
        return _read(output.read(), code, _how_it_ended(code, errors.read()))


def _end(process: subprocess.Popen) -> None:
    """Kill it, with the compilers that it started; a device may hold it longer."""
    os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END)


def _how_it_ended(code: int | None, errors: str) -> str:
    if code is None:
        return f'did not end in {TIME_LIMIT} seconds'
    if code < 0:
        return f'ended by signal {-code} ({signal.strsignal(-code)})'
    lines = errors.strip().splitlines()
    return f'raised {lines[-1]}' if code and lines else f'exited with status {code}'


def _read(output: str, code: int | None, end: str) -> Verdict:
    """The verdict, from lines of JSON that tell how far the process came."""
    said = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    tried = [line['case'] for line in said if 'case' in line]
    last = said[-1] if said else {}
    if 'passed' in last and code == 0:
        return Verdict(**last)
    if 'unchecked' in last or not tried:
        raise NotCheckedError(f'the check could not be made: {last.get("unchecked") or end}')
    return Verdict(passed=False, reason=f'{end} ({tried[-1]})')
