"""Stored results of the check of the Triton kernels, per device, versions and sources."""

import ctypes
import functools
import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from .triton import availability

COMMAND = 'aft_mm doctor --kernels'
COMPILED = ', compiled'


@dataclass(frozen=True)
class Result:
    """The result of a check.

    status: 'passed', 'failed' or 'unchecked', for `reason`; error: the largest relative error;
    speeds: by mode the device time of eager over that of the kernels, at two sizes. In modes that
    end with :data:`COMPILED` eager is compiled by Inductor.
    """

    status: str
    reason: str | None = None
    error: float | None = None
    speeds: dict[str, list[float]] = field(default_factory=dict)

    def objection(self, compiled: bool) -> str | None:
        """Return why dispatch does not use the kernels; None if it does."""
        if self.status != 'passed':
            return f'{self.status} on this device: {self.reason}'
        graphs = {mode: x for mode, x in self.speeds.items() if mode.endswith(COMPILED)}
        speeds = {mode: x for mode, x in self.speeds.items() if mode not in graphs}
        rival = 'eager'
        if compiled and graphs:
            speeds, rival = graphs, 'compiled eager'
        slowest = min((min(found) for found in speeds.values()), default=1.0)
        return None if slowest >= 1 else f'{slowest:.2f} times as fast as {rival} on this device'

    def __str__(self) -> str:
        if self.status != 'passed':
            return f'{self.status}: {self.reason}'
        pace = '; '.join(
            f'{mode} {", ".join(f"{x:.2f}" for x in found)} x eager'
            for mode, found in self.speeds.items()
        )
        return f'passed, largest error {self.error:.1e}' + (f'; {pace}' if pace else '')


@functools.cache
def device_key(device_type: str, index: int | None) -> dict[str, str]:
    """Return what a result depends on: the device, versions, and all sources of the ops."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(package.rglob('*.py')):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    key = dict(
        torch=torch.__version__,
        triton=availability.triton_version(),
        ptxas=os.environ.get('TRITON_PTXAS_PATH', 'bundled'),
        sources=digest.hexdigest(),
    )
    if device_type != 'cuda':
        return dict(device="Triton's interpreter", driver='none', **key)
    return dict(device=torch.cuda.get_device_name(index), driver=_driver_version(), **key)


def _driver_version() -> str:
    """Return the newest CUDA version that the driver supports, such as '13000'."""
    version = ctypes.c_int()
    ctypes.CDLL('libcuda.so.1').cuDriverGetVersion(ctypes.byref(version))
    return str(version.value)


def result_path(device_type: str, index: int | None) -> Path:
    """Return the file of results, below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    cache = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    key = json.dumps(device_key(device_type, index), sort_keys=True)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return Path(cache) / 'aft_mm' / 'kernels' / f'{digest}.json'


@functools.cache
def load_results(device_type: str, index: int | None) -> dict[str, Result]:
    """Return the stored results by 'op dtype'; empty without a readable file."""
    try:
        content = json.loads(result_path(device_type, index).read_text())
        return {name: Result(**found) for name, found in content['results'].items()}
    except (OSError, KeyError, TypeError, ValueError):
        return {}


def save_results(device_type: str, index: int | None, results: dict[str, Result]) -> Path:
    """Merge results into the file and return its path; an unchecked one replaces no other."""
    load_results.cache_clear()
    stored = load_results(device_type, index)
    merged = {**stored, **{k: v for k, v in results.items() if v.status != 'unchecked'}}
    merged = {**results, **merged}
    load_results.cache_clear()
    content = dict(
        key=device_key(device_type, index),
        results={name: asdict(result) for name, result in merged.items()},
    )
    path = result_path(device_type, index)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile('w', dir=path.parent, delete=False) as half:
        half.write(json.dumps(content, indent=1) + '\n')
    os.replace(half.name, path)
    return path


def objection(
    op: str, dtype: torch.dtype, compiled: bool, device_type: str, index: int | None
) -> str | None:
    """Return why the kernels of `op` are not used on this device; None if they are."""
    name = f'{op} {str(dtype).removeprefix("torch.")}'
    result = load_results(device_type, index).get(name)
    if result is None:
        _log_hint()
        return f'not checked on this device; {COMMAND} checks the kernels'
    return result.objection(compiled)


@functools.cache
def _log_hint() -> None:
    logging.getLogger('aft_mm.ops').warning(
        'Triton kernels that have not been checked on this device are not used; %s checks them',
        COMMAND,
    )
