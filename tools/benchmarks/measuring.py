"""Interleaved timing, so that a slow moment affects all candidates, and peak memory of a call."""

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

# Larger than the second-level cache of any GPU.
CACHE_BYTES = 256 * 2**20
RATE_ROUNDS = 20


@lru_cache
def _flush_buffer(device: str) -> Tensor:
    return torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)


def wall_seconds(call: Callable[[], object], device: str = 'cpu', clock: str = 'wall') -> float:
    """Time until the result is there, Python and launches included, by one of :data:`CLOCKS`."""
    start = CLOCKS[clock]()
    call()
    if torch.device(device).type == 'cuda':
        torch.cuda.synchronize(device)
    return CLOCKS[clock]() - start


def kernel_times(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Seconds on the device of each kernel, copy and fill among a profiler's events, by name.

    Operators carry the time of the kernels that they start, and ranges span them: neither counts.
    Raises RuntimeError if nothing is left, as where the driver lets no profiler in.
    """
    times: dict[str, float] = {}
    for event in events:
        on_device = event.device_type == DeviceType.CUDA and event.name != 'Context Sync'
        if on_device and not event.is_user_annotation:
            times[event.name] = times.get(event.name, 0.0) + event.time_range.elapsed_us() / 1e6
    if not sum(times.values()) > 0:
        raise RuntimeError(
            'the profiler saw no kernel, so there is no time of the device: CUPTI must be usable '
            'by this process'
        )
    return times


def profiled(call: Callable[[], object], device: str) -> dict[str, float]:
    """Seconds of each kernel of one call on a CUDA device, inputs coming from memory."""
    _flush_buffer(device).zero_()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize(device)
    return kernel_times(recorded.events())


def seconds(call: Callable[[], object], device: str = 'cpu', clock: str = 'wall') -> float:
    """Time of one call: that of the clock on a CPU, the sum of its kernels on a CUDA device.

    Between two events on the device a call of many small kernels would be timed by the Python that
    starts them.
    """
    if torch.device(device).type == 'cpu':
        return wall_seconds(call, device, clock)
    return sum(profiled(call, device).values())


def progress(text: str) -> None:
    """Write over the last line of a terminal; in a log the lines would pile up."""
    if sys.stderr.isatty():
        print(text, end='', file=sys.stderr, flush=True)


Times = dict[Any, list[float]]


def interleaved(
    calls: Mapping[Any, Callable[[], object]], rounds: int, device: str = 'cpu', clock: str = 'wall'
) -> Times:
    """Seconds of each call per round, the calls in turn, after one round that does not count."""
    return both_clocks(calls, rounds, device, clock)[0]


def both_clocks(
    calls: Mapping[Any, Callable[[], object]], rounds: int, device: str = 'cpu', clock: str = 'wall'
) -> tuple[Times, Times]:
    """:func:`interleaved` by :func:`seconds` and by :func:`wall_seconds`, one on a CPU."""
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
    return times, walls


def ratio(times: Times, slow: Any, fast: Any) -> float:
    """Median over rounds of time(slow) / time(fast)."""
    pairs = zip(times[slow], times[fast], strict=True)
    return statistics.median(a / b for a, b in pairs)


def device_rates(device: str, dtype: torch.dtype) -> dict[str, float]:
    """Bytes per second of a copy and operations per second of a matrix product on the device.

    The upper bounds that the other numbers of a run are a fraction of; a copy of n bytes moves 2n,
    a product of n×n matrices is 2n³ operations.
    """
    cpu = torch.device(device).type == 'cpu'
    source = torch.empty(2 ** (25 if cpu else 29), dtype=dtype, device=device).normal_()
    target = torch.empty_like(source)
    side = 768 if cpu else 8192
    left, right = torch.randn(2, side, side, device=device).to(dtype).unbind()
    calls = {'copy': lambda: target.copy_(source), 'product': lambda: left @ right}
    fastest = {name: min(times) for name, times in interleaved(calls, RATE_ROUNDS, device).items()}
    return dict(
        copy_bytes_per_second=2 * source.nbytes / fastest['copy'],
        matrix_operations_per_second=2 * side**3 / fastest['product'],
    )


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
