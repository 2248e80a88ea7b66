"""``python -m aft_mm.ops``: the table of ops and backends, and why each is or is not available.

With ``--verify`` it checks the Triton kernels on this device and keeps the verdicts.
"""

import argparse
from collections.abc import Sequence

import torch

from . import verify
from .dispatch import requested_backends
from .table import DTYPE_NAMES, indexed, print_table
from .triton import support
from .triton.support import KERNELS


def _verify(ops: Sequence[str], dtypes: Sequence[str], name: str) -> bool:
    """Check anew, a row each; whether all passed."""
    device = torch.device(name)
    lacks = support.machine_reasons(device.type, device.index)
    if lacks:
        raise SystemExit(f'Error: there is nothing to verify on {name}: triton {lacks[0]}')
    device, passed = indexed(device), True
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
    parser = argparse.ArgumentParser(prog='python -m aft_mm.ops', description=print_table.__doc__)
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
        print_table()
    elif not _verify(args.op or list(KERNELS), args.dtype or list(DTYPE_NAMES), device):
        raise SystemExit(1)


if __name__ == '__main__':
    main()
