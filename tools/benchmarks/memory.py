"""Peak memory of a call, each in a process of its own (Linux)."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def proc_status(field: str) -> float:
    """A memory field of this process in MiB: VmRSS now, VmHWM the peak since its last reset."""
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def added_peak(call: Callable[[], object]) -> float:
    """MiB that `call` adds, at its peak, to what this process holds."""
    Path('/proc/self/clear_refs').write_text('5')
    before = proc_status('VmRSS')
    call()
    return proc_status('VmHWM') - before


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a new process: memory freed earlier would be used again here."""
    context = get_context('spawn')
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
        return pool.submit(function, *args).result()
