"""Interleaved timing, which exposes all candidates to the same load, and peak memory."""

import ctypes
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from arguments import CLOCKS
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from aft_mm.engine.allocator import keep_freed_memory

# Larger than the L2 cache of any GPU.
CACHE_BYTES = 256 * 2**20


@lru_cache
def _flush_buffer(device: str) -> Tensor:
    return torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)


def wall_seconds(call: Callable[[], object], device: str = 'cpu', clock: str = 'wall') -> float:
    start = CLOCKS[clock]()
    call()
    if torch.device(device).type == 'cuda':
        torch.cuda.synchronize(device)
    return CLOCKS[clock]() - start


def kernel_times(events: Iterable[FunctionEvent]) -> dict[str, float]:
    times: dict[str, float] = {}
    for event in events:
        on_device = event.device_type == DeviceType.CUDA and event.name != 'Context Sync'
        if on_device and not event.is_user_annotation:
            times[event.name] = times.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e6
    if not sum(times.values()) > 0:
        raise RuntimeError(
            'the profiler found no kernel, so there is no device time; this process must be '
            'allowed to use CUPTI'
        )
    return times


def profiled(call: Callable[[], object], device: str) -> dict[str, float]:
    """Return the seconds of each kernel of a call with a cold L2 cache."""
    _flush_buffer(device).zero_()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize(device)
    return kernel_times(recorded.events())


def seconds(call: Callable[[], object], device: str = 'cpu', clock: str = 'wall') -> float:
    """Return the time of a call: by the clock on a CPU, the sum of its kernels on a CUDA device.

    The time between two CUDA events would include the Python overhead of small kernels.
    """
    if torch.device(device).type == 'cpu':
        return wall_seconds(call, device, clock)
    return sum(profiled(call, device).values())


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, end='', file=sys.stderr, flush=True)


Times = dict[Any, list[float]]


def interleaved(
    calls: Mapping[Any, Callable[[], object]], rounds: int, device: str = 'cpu', clock: str = 'wall'
) -> Times:
    return both_clocks(calls, rounds, device, clock)[0]


def both_clocks(
    calls: Mapping[Any, Callable[[], object]], rounds: int, device: str = 'cpu', clock: str = 'wall'
) -> tuple[Times, Times]:
    times: Times = {name: [] for name in calls}
    on_cpu = torch.device(device).type == 'cpu'
    walls: Times = times if on_cpu else {name: [] for name in calls}
    for call in calls.values():
        seconds(call, device, clock)
    for done in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, device, clock))
            if not on_cpu:
                walls[name].append(wall_seconds(call, device))
        progress(f'\r  round {done + 1}/{rounds}')
    progress('\r' + ' ' * 20 + '\r')
    return times, {} if on_cpu and clock == 'cpu' else walls


def ratio(times: Times, slow: Any, fast: Any) -> float:
    pairs = zip(times[slow], times[fast], strict=True)
    return statistics.median(a / b for a, b in pairs)


def proc_status(field: str) -> float:
    """Return a memory field of this process in MiB: VmRSS now, VmHWM the peak since its reset."""
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def added_peak(call: Callable[[], object], device: str = 'cpu') -> float:
    if torch.device(device).type == 'cpu':
        # Otherwise the call would reuse freed memory unnoticed.
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


def in_fresh_process(
    function: Callable[..., Any], *args: Any, malloc: Callable[[], bool] = keep_freed_memory
) -> Any:
    # Forks of a server need not import again.
    context = get_context('forkserver')
    context.set_forkserver_preload(['aft_mm.models'])
    with ProcessPoolExecutor(1, context, malloc) as pool:
        return pool.submit(function, *args).result()
