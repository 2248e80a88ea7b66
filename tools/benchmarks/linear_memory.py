"""Measure the peak memory of the causal gradient of linear attention on a CPU.

    python tools/benchmarks/linear_memory.py --json out.json

The printed ratio is relative to the eight tensors [1, T, h, D/h] that any implementation stores:
query, key, value, output, and their gradients.
"""

import argparse
from pathlib import Path

from arguments import positive_int


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--tokens', type=positive_int, default=65_536, help='sequence length T; default %(default)s'
    )
    parser.add_argument(
        '--heads', type=positive_int, default=8, help='number of heads h; default %(default)s'
    )
    parser.add_argument(
        '--head-dims', type=positive_int, nargs='+', default=[32, 64], help='channels per head D/h'
    )
    parser.add_argument('--json', type=Path, help='write rows and environment to this file')
    return parser.parse_args(arguments)


if __name__ == '__main__':
    parse_args()  # before the slow imports

import torch
from measuring import added_peak, in_fresh_process
from record import write_json

from aft_mm import ops
from aft_mm.engine.allocator import return_freed_memory


def ratio(tokens: int, heads: int, head_dims: int) -> float:
    """Return the peak divided by the eight tensors."""
    return in_fresh_process(_ratio, tokens, heads, head_dims, malloc=return_freed_memory)


def _ratio(tokens: int, heads: int, head_dims: int) -> float:
    shape = (1, tokens, heads, head_dims)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    cotangent = torch.randn(shape)

    def gradients() -> None:
        y = ops.linear_attention(*inputs, causal=True)
        torch.autograd.grad(y, inputs, cotangent)

    gradients()  # the first call imports sympy, 32 MiB
    one = cotangent.nbytes / 2**20
    # Inputs and cotangent exist before the call.
    return (added_peak(gradients) + 4 * one) / (8 * one)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    rows = [dict(head_dims=n, ratio=ratio(args.tokens, args.heads, n)) for n in args.head_dims]
    for row in rows:
        print(f'T {args.tokens}, {args.heads} heads of {row["head_dims"]}: {row["ratio"]:.2f}')
    args.device = 'cpu'
    write_json(args.json, rows, args)


if __name__ == '__main__':
    main()
