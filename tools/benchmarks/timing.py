"""What the benchmarks share: interleaved timing and the JSON that records a run."""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def interleaved(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call per round, the calls in turn, so that a slow moment falls on all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for done in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
        print(f'\r  round {done + 1}/{rounds}', end='', file=sys.stderr, flush=True)
    print('\r' + ' ' * 20 + '\r', end='', file=sys.stderr)
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> float:
    """Median over rounds of time(slow) / time(fast)."""
    pairs = zip(times[slow], times[fast], strict=True)
    return statistics.median(a / b for a, b in pairs)


def require_close(name: str, got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    """Stop the run if the largest error exceeds the tolerance."""
    error = (got.double() - expected.double()).abs().max().item()
    if not error <= tolerance:
        raise SystemExit(f'{name} is wrong by {error:.2e} > {tolerance}: not timed')


def write_json(path: Path | None, rows: list[dict], **settings) -> None:
    """Write the rows with what they were measured on, if a path is given."""
    if path is None:
        return
    about = dict(torch=torch.__version__, machine=platform.machine(), **settings)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(environment=about, rows=rows), indent=2) + '\n')
