"""``python -m aft_mm.ops``: the table of ops and backends, and why each is or is not available.

With ``--verify`` it checks the Triton kernels on this device and keeps the verdicts.
"""

import argparse
from collections.abc import Sequence

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
    requested_backends,
)
from .triton import support
from .triton.support import DTYPES, KERNELS, LIMITS
from .verify.policy import ENVIRONMENT_VARIABLE as VERIFY_VARIABLE
from .verify.policy import MODES

DTYPE_NAMES = {str(dtype).removeprefix('torch.'): dtype for dtype in DTYPES}


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


def _serving(op: str, tensors: list, options: dict) -> str | None:
    try:
        return choose_backend(op, tensors, options, check=False)
    except BackendError:  # the backend that the environment asks for cannot; the table says why
        return None


def _print_table() -> None:
    """One row per op and device, one column per backend, then the reasons and the verdicts."""
    width = max(map(len, STEPS))
    columns = ''.join(f'{name:>12}' for name in BACKENDS)
    print(f'{"op":<{width}}  device{columns}')
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for device in _devices():
        tensors = [torch.empty(1, 1, 1, device=device)] * 3
        for op in (*OPS, *STEPS):
            call = op, tensors, KERNELS.get(op, {})
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
    device = _indexed(device)
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


def _indexed(device: torch.device) -> torch.device:
    """The device as tensors name it."""
    if device.type == 'cuda' and device.index is None:
        return torch.device('cuda', torch.cuda.current_device())
    return device


def _verify(ops: Sequence[str], dtypes: Sequence[str], name: str) -> bool:
    """Check anew, a row each; whether all passed."""
    device = torch.device(name)
    lacks = support.machine_reasons(device.type, device.index)
    if lacks:
        raise SystemExit(f'Error: there is nothing to verify on {name}: triton {lacks[0]}')
    device, passed = _indexed(device), True
    for op in ops:
        for dtype in dtypes:
            subject = verify.Subject(op, dtype, device.type, device.index)
            try:
                verdict = verify.make(subject)
            except verify.NotCheckedError as reason:
                print(f'{subject}: {reason}', flush=True)
                passed = False
            else:
                print(f'{subject}: {verdict}', flush=True)
                passed = passed and verdict.passed
    return passed


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m aft_mm.ops', description=_print_table.__doc__)
    parser.add_argument(
        '--verify', action='store_true',
        help='check the Triton kernels against the oracle instead, and keep the verdicts; the '
        'status is 1 unless all pass',
    )  # fmt: skip
    parser.add_argument('--op', nargs='+', choices=KERNELS, help='with --verify; all of them')
    parser.add_argument('--dtype', nargs='+', choices=DTYPE_NAMES, help='with --verify; all three')
    parser.add_argument('--device', help="with --verify; 'cuda', or 'cpu' in the interpreter")
    args = parser.parse_args(argv)
    if not args.verify and (args.op or args.dtype or args.device):
        parser.error('--op, --dtype and --device say what to --verify')
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table, or check the kernels."""
    args = _parse_args(argv)
    try:
        requested_backends()
        verify.mode()
        device = args.device or ('cpu' if support.interpreted() else 'cuda')
        torch.device(device)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f'Error: {error}') from None
    if not args.verify:
        _print_table()
    elif not _verify(args.op or list(KERNELS), args.dtype or list(DTYPE_NAMES), device):
        raise SystemExit(1)


if __name__ == '__main__':
    main()
