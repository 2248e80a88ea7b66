"""``python -m aft_mm.ops`` prints the table of ops and backends; --verify checks the kernels."""

import argparse
from collections.abc import Sequence

import torch

from . import selftest
from .dispatch import requested_backends
from .table import print_table
from .triton.availability import KERNELS, interpreted


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='python -m aft_mm.ops', description=print_table.__doc__)
    parser.add_argument(
        '--verify',
        action='store_true',
        help='check the Triton kernels on this device and store the results, which enables the '
        'kernels that pass; the exit status is 1 unless all pass',
    )
    parser.add_argument('--op', nargs='+', choices=KERNELS, help='with --verify; default: all')
    parser.add_argument(
        '--dtype', nargs='+', choices=selftest.DTYPES, help='with --verify; default: all'
    )
    parser.add_argument('--device', help="with --verify; 'cuda', or 'cpu' in the interpreter")
    args = parser.parse_args(argv)
    if not args.verify and (args.op or args.dtype or args.device):
        parser.error('--op, --dtype and --device need --verify')
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse_args(argv)
    device = args.device or ('cpu' if interpreted() else 'cuda')
    try:
        requested_backends()
        torch.device(device)
        passed = not args.verify or selftest.check_kernels(args.op, args.dtype, device)
    except (ValueError, RuntimeError, OSError) as error:
        raise SystemExit(f'Error: {error}') from None
    if not args.verify:
        print_table()
    elif not passed:
        raise SystemExit(1)


if __name__ == '__main__':
    main()
