"""Speed of single ops, forward, as ratios within one process.

`kernels`: AFT-conv for kernels 3 to 27 on a 14×14 grid, as multiples of kernel 11: a cliff would
stand out.
`local`: causal AFT-local (T = 3072, D = 256, window 256, batch 2) in blocks against its dense
masked form and torch's scaled_dot_product_attention, and its safe path against the fast one.

    python tools/benchmarks/op_speed.py kernels local --json out.json

A result that disagrees with the float64 oracle (kernels) or the dense form in float64 (local) stops
the run before anything is timed.
"""

import argparse
import os
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from decoders import dense_local
from timing import interleaved, ratio, require_close, write_json
from torch import Tensor

from aft_mm import ops
from aft_mm.ops import reference


def bench_kernels(rounds: int) -> list[dict]:
    """AFT-conv over kernel sizes."""
    batch, side, dims, heads = 16, 14, 192, 32
    query, value = torch.randn(2, batch, side * side, dims).unbind()
    key = torch.randn(batch, side * side, heads)
    calls = {}
    for kernel in (3, 5, 7, 9, 11, 13, 15, 19, 23, 25, 27):
        weight = torch.randn(heads, kernel, kernel)
        options = dict(global_connectivity=True, causal=False, key_mask=None, gate='sigmoid')
        part = (query[:1, :, :12], key[:1, :, :2], value[:1, :, :12], weight[:2])
        expected = reference.aft_conv(*part, grid=(side, side), **options)
        require_close(f'kernel {kernel}', ops.aft_conv(*part, grid=(side, side)), expected)

        def call(weight: Tensor = weight * 0.1) -> Tensor:
            return ops.aft_conv(query, key, value, weight, grid=(side, side))

        calls[str(kernel)] = call
    times = interleaved(calls, rounds)
    rows = []
    for name, seconds in times.items():
        row = dict(
            case='kernels',
            kernel=int(name),
            milliseconds=statistics.median(seconds) * 1e3,
            times_kernel_11=ratio(times, name, '11'),
        )
        rows.append(row)
        print(
            f'kernel {name:>2}: {row["milliseconds"]:7.2f} ms, {row["times_kernel_11"]:5.2f} x k11'
        )
    return rows


def bench_local(rounds: int) -> list[dict]:
    """Causal AFT-local against the dense form and softmax attention."""
    batch, tokens, dims, window, rank = 2, 3072, 256, 256, 64
    query, key, value = torch.randn(3, batch, tokens, dims).unbind()
    factors = (torch.randn(2, tokens, rank) * 0.1).unbind()
    heads = [x.unflatten(2, (4, -1)).transpose(1, 2) for x in (query, key, value)]

    def local(scale: float = 1.0) -> Tensor:
        return ops.aft_local(query, key * scale, value, *factors, window=window, causal=True)

    wide = (x.double() for x in (query, key, value, *factors))
    require_close('aft_local', local(), dense_local(*wide, window=window))
    calls = {
        'aft_local': local,
        'dense masked': lambda: dense_local(query, key, value, *factors, window=window),
        'softmax': lambda: F.scaled_dot_product_attention(*heads, is_causal=True),
        'aft_local, safe path': lambda: local(100.0),
    }
    times = interleaved(calls, rounds)
    rows = []
    for name in calls:
        row = dict(case='local', form=name, milliseconds=statistics.median(times[name]) * 1e3)
        row['times_aft_local'] = ratio(times, name, 'aft_local')
        rows.append(row)
        print(f'{name:<22}{row["milliseconds"]:8.1f} ms, {row["times_aft_local"]:6.2f} x aft_local')
    return rows


CASES = {'kernels': bench_kernels, 'local': bench_local}


@torch.inference_mode()
def main() -> None:
    """Run the cases that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('cases', nargs='*', default=list(CASES), help=', '.join(CASES))
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--threads', type=int, default=os.cpu_count())
    parser.add_argument('--json', type=Path, help='write rows and the environment here')
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f'cases must be among {", ".join(CASES)}, got {", ".join(unknown)}')
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    rows = [row for case in args.cases for row in CASES[case](args.rounds)]
    write_json(args.json, rows, threads=args.threads, rounds=args.rounds)


if __name__ == '__main__':
    main()
