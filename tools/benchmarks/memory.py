"""Peak memory of a call: of a CPU process by Linux, on a CUDA device by torch's allocator."""

import ctypes
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from aft_mm.engine.allocator import keep_freed_memory


def proc_status(field: str) -> float:
    """A memory field of this process in MiB: VmRSS now, VmHWM the peak since its last reset."""
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def added_peak(call: Callable[[], object], device: str = 'cpu') -> float:
    """MiB that `call` adds, at its peak, to what this process holds on the device."""
    if torch.device(device).type == 'cpu':
        # What was freed goes back to the system, or the call would use it again unseen.
        if trim := getattr(ctypes.CDLL(None), 'malloc_trim', None):
            trim(0)
        Path('/proc/self/clear_refs').write_text('5')
        before = proc_status('VmRSS')
        call()
        return proc_status('VmHWM') - before
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - allocated) / 2**20


def in_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in a new process: memory freed earlier would be used again here.

    The allocator is that of the tools.
    """
    # A server that holds the imports and nothing else is forked instead of importing them anew.
    context = get_context('forkserver')
    context.set_forkserver_preload(['aft_mm.models'])
    with ProcessPoolExecutor(1, context, keep_freed_memory) as pool:
        return pool.submit(function, *args).result()
