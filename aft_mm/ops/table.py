from collections.abc import Mapping
from typing import Any

import torch

from .checks import ENVIRONMENT_VARIABLE
from .cuda import availability as cuda_availability
from .dispatch import BACKENDS, OPS, STEPS, BackendError, choose_backend, unsupported_reasons
from .native import availability as native_availability
from .triton.availability import KERNELS, LIMITS


def _needs(kernels: Mapping[str, Mapping[str, Any]], limits: Mapping[str, str]) -> str:
    parts = []
    for op, options in kernels.items():
        needs = [f'{name}={value!r}' for name, value in options.items()]
        if op in limits:
            needs.append(limits[op])
        parts.append(f'{op} ({", ".join(needs) or "any options"})')
    return '; '.join(parts)


ABOUT = {
    'cuda': 'CUDA C++ compiled at first use, not float64: '
    + _needs(cuda_availability.KERNELS, cuda_availability.LIMITS),
    'triton': f'fused kernels for CUDA devices: {_needs(KERNELS, LIMITS)}',
    'native': 'loops in C++ for the CPU, float32 and bfloat16: '
    + _needs(native_availability.KERNELS, native_availability.LIMITS),
    'eager': 'composite torch operations, every op and option on every device',
    'reference': 'the oracle, every op as the papers define it, in float64 and O(B·T²·D) memory',
}


def _devices() -> list[torch.device]:
    available = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available()}
    return [torch.device(name) for name in ('cpu', *(n for n, here in available.items() if here))]


def print_table() -> None:
    """Print a row per op and device with a column per backend, then reasons."""
    width = max(map(len, STEPS))
    columns = ''.join(f'{name:>12}' for name in BACKENDS)
    print(f'{"op":<{width}}  device{columns}')
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for device in _devices():
        tensors = [torch.empty(1, 1, 1, device=device)] * 3
        for op in (*OPS, *STEPS):
            options = {**KERNELS.get(op, {}), **native_availability.KERNELS.get(op, {})}
            try:
                used = choose_backend(op, tensors, options)
            except BackendError:  # the reasons below say why
                used = None
            cells = []
            for backend in BACKENDS:
                unsupported = unsupported_reasons(backend, op, tensors, options)
                for reason in unsupported:
                    reasons.setdefault((backend, device.type, reason), []).append(op)
                cells.append('used' if backend == used else 'no' if unsupported else 'available')
            print(f'{op:<{width}}  {device.type:<6}' + ''.join(f'{cell:>12}' for cell in cells))
    for backend in BACKENDS:
        print(f'{backend}: {ABOUT[backend]}')
    for (backend, device_type, reason), refused in reasons.items():
        what = 'any op or step' if len(refused) == len(OPS + STEPS) else ', '.join(refused)
        print(f'{backend} cannot run {what} on {device_type}: {reason}')
    print(f'{ENVIRONMENT_VARIABLE} selects from {", ".join(BACKENDS)}: one, or several to try')
    print('aft_mm doctor --kernels checks and times the kernels on this device')
