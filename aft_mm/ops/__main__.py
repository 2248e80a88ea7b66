"""``python -m aft_mm.ops``: the table of ops and backends, and why each is or is not available."""

import argparse

import torch

from .dispatch import (
    BACKENDS,
    ENVIRONMENT_VARIABLE,
    OPS,
    STEPS,
    BackendError,
    choose_backend,
    reasons_against,
    requested_backends,
)
from .triton.support import KERNELS, LIMITS


def _needs(op: str) -> str:
    """What a kernel needs, in words."""
    needs = [f'{name}={value!r}' for name, value in KERNELS[op].items()]
    if op in LIMITS:
        needs.append(LIMITS[op].__doc__ or '')
    return f'{op} ({", ".join(needs) or "any options"})'


ABOUT = {
    'triton': 'fused kernels for CUDA devices: ' + '; '.join(map(_needs, KERNELS)),
    'eager': 'composite torch operations, every op and option on every device',
    'fla': "fla-core's kernel of causal linear_attention for CUDA devices",
    'reference': 'the oracle, every op as the papers write it, in float64 and O(B·T²·D) memory',
}


def _devices() -> list[torch.device]:
    available = {'cuda': torch.cuda.is_available(), 'mps': torch.backends.mps.is_available()}
    return [torch.device(name) for name in ('cpu', *(n for n, here in available.items() if here))]


def _serving(call: tuple) -> str | None:
    try:
        return choose_backend(*call)
    except BackendError:  # the backend that the environment asks for cannot; the table says why
        return None


def main() -> None:
    """Print one row per op and device, one column per backend, then the reasons."""
    argparse.ArgumentParser(prog='python -m aft_mm.ops', description=main.__doc__).parse_args()
    try:
        requested_backends()
    except ValueError as error:
        raise SystemExit(f'Error: {error}') from None
    width = max(map(len, STEPS))
    columns = ''.join(f'{name:>12}' for name in BACKENDS)
    print(f'{"op":<{width}}  device{columns}')
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for device in _devices():
        tensors = [torch.empty(1, 1, 1, device=device)] * 3
        for op in (*OPS, *STEPS):
            call = op, tensors, KERNELS.get(op, {})
            serving = _serving(call)
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
    print(f'{ENVIRONMENT_VARIABLE} chooses from {", ".join(BACKENDS)}: one, or several to try')


if __name__ == '__main__':
    main()
