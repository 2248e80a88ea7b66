"""Interleaved timing: every form of a thing in turn, so that a slow moment falls on all of them."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
from torch import Tensor

# Larger than the second-level cache of any GPU.
CACHE_BYTES = 256 * 2**20
RATE_ROUNDS = 20


@lru_cache
def _flush_buffer(device: str) -> Tensor:
    return torch.empty(CACHE_BYTES, dtype=torch.int8, device=device)


def wall_seconds(call: Callable[[], object], device: str = 'cpu') -> float:
    """Time until the result is there, Python and launches included."""
    start = time.perf_counter()
    call()
    if torch.device(device).type == 'cuda':
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def seconds(call: Callable[[], object], device: str = 'cpu') -> float:
    """Time of one call: wall time on a CPU, between two events on a CUDA device."""
    if torch.device(device).type == 'cpu':
        return wall_seconds(call, device)
    # Inputs come from memory, and the launches are queued before the clock starts.
    _flush_buffer(device).zero_()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def progress(text: str) -> None:
    """Write over the last line of a terminal; in a log the lines would pile up."""
    if sys.stderr.isatty():
        print(text, end='', file=sys.stderr, flush=True)


def interleaved(
    calls: Mapping[str, Callable[[], object]], rounds: int, device: str = 'cpu'
) -> dict[str, list[float]]:
    """Seconds of each call per round, the calls in turn, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        seconds(call, device)
    for done in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, device))
        progress(f'\r  round {done + 1}/{rounds}')
    progress('\r' + ' ' * 20 + '\r')
    return times


def ratio(times: Mapping[str, list[float]], slow: str, fast: str) -> float:
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
