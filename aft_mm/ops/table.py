"""The table of ops and backends, and why each is or is not available."""

from collections.abc import Mapping
from typing import Any

import torch

from . import verify
from .dispatch import (
    BACKENDS,
    ENVIRONMENT_VARIABLE,
    OPS,
    STEPS,
    BackendError,
    choose_backend,
    reasons_against,
)
from .native import availability as native_availability
from .triton import support
from .triton.support import DTYPES, KERNELS, LIMITS
from .verify.policy import ENVIRONMENT_VARIABLE as VERIFY_VARIABLE
from .verify.policy import MODES

DTYPE_NAMES = {str(dtype).removeprefix('torch.'): dtype for dtype in DTYPES}


def _needs(op: str, kernels: Mapping[str, Mapping[str, Any]]) -> str:
    """What a kernel needs, in words."""
    needs = [f'{name}={value!r}' for name, value in kernels[op].items()]
    if kernels is KERNELS and op in LIMITS:
        needs.append(LIMITS[op].__doc__ or '')
    return f'{op} ({", ".join(needs) or "any options"})'


def _all_needs(kernels: Mapping[str, Mapping[str, Any]]) -> str:
    return '; '.join(_needs(op, kernels) for op in kernels)


ABOUT = {
    'triton': f'fused kernels for CUDA devices: {_all_needs(KERNELS)}',
    'native': f'loops in C++ for the CPU: {_all_needs(native_availability.KERNELS)}',
    'eager': 'composite torch operations, every op and option on every device',
    'fla': "fla-core's kernel of causal linear_attention for CUDA devices",
    'reference': 'the oracle, every op as the papers write it, in float64 and O(B·T²·D) memory',
}


def _devices() -> list[torch.device]:
    available = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available()}
    return [torch.device(name) for name in ('cpu', *(n for n, here in available.items() if here))]


def _serving(op: str, tensors: list, options: dict) -> str | None:
    try:
        return choose_backend(op, tensors, options, check=False)
    except BackendError:  # the backend that the environment asks for cannot; the table says why
        return None


def print_table() -> None:
    """One row per op and device, one column per backend, then the reasons and the verdicts."""
    width = max(map(len, STEPS))
    columns = ''.join(f'{name:>12}' for name in BACKENDS)
    print(f'{"op":<{width}}  device{columns}')
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for device in _devices():
        tensors = [torch.empty(1, 1, 1, device=device)] * 3
        for op in (*OPS, *STEPS):
            call = op, tensors, {**KERNELS.get(op, {}), **native_availability.KERNELS.get(op, {})}
            serving = _serving(*call)
            cells = []
            for backend in BACKENDS:
                against = reasons_against(backend, *call)
                for reason in against:
                    reasons.setdefault((backend, device.type, reason), []).append(op)
                cells.append('serves' if backend == serving else 'no' if against else 'available')
            print(f'{op:<{width}}  {device.type:<6}' + ''.join(f'{cell:>12}' for cell in cells))
    for backend in BACKENDS:
        print(f'{backend}: {ABOUT[backend]}')
    for (backend, device_type, reason), refused in reasons.items():
        what = 'any op or step' if len(refused) == len(OPS + STEPS) else ', '.join(refused)
        print(f'{backend} does not serve {what} on {device_type}: {reason}')
    for device in _devices():
        _print_verdicts(device, width)
    print(f'{ENVIRONMENT_VARIABLE} chooses from {", ".join(BACKENDS)}: one, or several to try')
    print(f'{VERIFY_VARIABLE} says what to do without a verdict: {", ".join(MODES)}')


def _print_verdicts(device: torch.device, width: int) -> None:
    """What is on disk about the kernels of a device, if it has any."""
    device = indexed(device)
    if support.machine_reasons(device.type, device.index):
        return
    print(f'{"verdict":<{width}}  device' + ''.join(f'{name:>16}' for name in DTYPE_NAMES))
    failed = []
    for op in KERNELS:
        cells = []
        for dtype in DTYPE_NAMES:
            subject = verify.Subject(op, dtype, device.type, device.index)
            try:
                verdict = verify.find(subject, 'it is not asked for')
            except verify.NotCheckedError:
                cells.append('none')
                continue
            pace = '' if verdict.speed is None else f' {verdict.speed:.2f} ×'
            cells.append(f'passed{pace}' if verdict.passed else 'failed')
            failed += [] if verdict.passed else [f'{subject} {verdict}']
        print(f'{op:<{width}}  {device.type:<6}' + ''.join(f'{cell:>16}' for cell in cells))
    print('\n'.join([*failed, 'n × is the speed over that of eager']))


def indexed(device: torch.device) -> torch.device:
    """The device as tensors name it."""
    if device.type == 'cuda' and device.index is None:
        return torch.device('cuda', torch.cuda.current_device())
    return device
