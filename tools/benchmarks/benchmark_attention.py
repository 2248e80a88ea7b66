"""Measure the cost of causal mixers by length: figure 1 of the linear-transformer paper.

The cost is time and peak memory of forward and backward of one mixer, per sample. The slope of log
cost over log length is printed: 1 is linear, 2 quadratic.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from arguments import MIXER_NAMES, add_clock, common_parser, named_in_errors, positive_int
from decoders import check_mixer, mixer
from measuring import added_peak, in_fresh_process, interleaved, seconds
from parity import require_close
from record import environment, fill_in, set_up_torch, write_json

from aft_mm.registry import MODELS
from aft_mm.visualization.figures import new_figure

KINDS = {'ms': 'forward + backward, ms per sample', 'mib': 'peak memory, MiB per sample'}
DEFAULTS = {
    kind: dict(
        mixers=['softmax', 'linear', 'lsh-4', 'aft-simple', 'aft-local-32'],
        lengths=[2**i for i in range(9, 17)],
        tokens=tokens,
        dims=256,
        heads=8,
        rounds=5,
    )
    for kind, tokens in (('cpu', 2**13), ('cuda', 2**16))
}


def build(name: str, length: int, dims: int, heads: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = dict(mixer(name, heads), embed_dims=dims, grid=(length,), causal=True)
    return MODELS.build(config)


def make_call(
    name: str, length: int, dims: int, heads: int, tokens: int, device: str = 'cpu'
) -> Callable[[], None]:
    layer = build(name, length, dims, heads).to(device)
    x = torch.randn(max(1, tokens // length), length, dims, device=device, requires_grad=True)

    def call() -> None:
        layer(x).square().mean().backward()
        layer.zero_grad(set_to_none=True)
        x.grad = None

    return call


def cpu_peak(name: str, length: int, dims: int, heads: int, tokens: int, threads: int) -> float:
    torch.set_num_threads(threads)
    make_call(name, 64, dims, heads, 64)()  # loads libraries
    return added_peak(make_call(name, length, dims, heads, tokens))


def check(name: str, args: argparse.Namespace) -> None:
    layer = build(name, 80, args.dims, args.heads).to(args.device).eval()
    x = torch.randn(2, 80, args.dims, device=args.device)
    state, rows = layer.init_state(2), []
    for t in range(80):
        row, state = layer.step(x[:, t], state)
        rows.append(row)
    with torch.no_grad():
        require_close(f'{name} step by step', torch.stack(rows, 1), layer(x), 1e-3)


def leave_out(name: str, length: int, reason: str) -> None:
    print(f'{name} of {length} tokens is left out: {reason}', file=sys.stderr)


def sweep(
    make: Callable[[str, int], Callable[[], object]], args: argparse.Namespace
) -> dict[tuple[str, int], float]:
    """Return seconds by mixer and length, where one call is expected to take at most `patience`."""
    calls, last = {}, {}
    for length in args.lengths:
        for name in args.mixers:
            before = last.get(name, (length, 0.0))
            expected = before[1] * (length / before[0]) ** 2
            if expected > args.patience:
                reason = f'it would take {expected:.0f} s, --patience is {args.patience:g}'
                leave_out(name, length, reason if expected < math.inf else 'a shorter one was')
                continue
            call = make(name, length)
            try:
                call()
                last[name] = (length, seconds(call, args.device, args.clock))
                calls[name, length] = call
            except torch.OutOfMemoryError:
                last[name] = (length, math.inf)
                leave_out(name, length, 'out of memory')
    times = interleaved(calls, args.rounds, args.device, args.clock)
    return {cell: statistics.median(values) for cell, values in times.items()}


def measure(args: argparse.Namespace) -> list[dict]:
    sizes = (args.dims, args.heads, args.tokens)
    cells = [(name, length) for name in args.mixers for length in args.lengths]
    rows = {cell: {} for cell in cells}
    if 'ms' in args.kinds:
        times = sweep(lambda *cell: make_call(*cell, *sizes, args.device), args)
        rows = {cell: dict(ms=1e3 * value, rounds=args.rounds) for cell, value in times.items()}
    if 'mib' in args.kinds:
        for cell, row in rows.items():
            if torch.device(args.device).type == 'cuda':
                row['mib'] = added_peak(make_call(*cell, *sizes, args.device), args.device)
            else:
                row['mib'] = in_fresh_process(cpu_peak, *cell, *sizes, args.threads)
    for (_, length), row in rows.items():
        row.update({kind: row[kind] / max(1, args.tokens // length) for kind in args.kinds})
    return [dict(mixer=name, length=length, **rows[name, length]) for name, length in sorted(rows)]


def curve(rows: list[dict], mixer: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    chosen = [row for row in rows if row['mixer'] == mixer and row.get(kind) is not None]
    points = [(row['length'], row[kind]) for row in chosen]
    return tuple(np.array(points).T) if points else (np.array([]), np.array([]))


def summary(rows: list[dict]) -> list[str]:
    lines = []
    for name in dict.fromkeys(row['mixer'] for row in rows):
        for kind, label in KINDS.items():
            lengths, costs = np.log(curve(rows, name, kind))
            if len(lengths) < 2:
                lines += [f'{name:<16}{label:<36}no slope: one length'] * len(lengths)
                continue
            half = len(lengths) // 2 if len(lengths) > 3 else 0
            slopes = [np.polyfit(lengths[i:], costs[i:], 1)[0] for i in (0, half)]
            lines.append(
                f'{name:<16}{label:<36}slope {slopes[0]:5.2f}, longer half {slopes[1]:5.2f}'
            )
    return lines


def plot(rows: list[dict], path: Path, title: str) -> None:
    figure = new_figure(9, 3.8, title)
    axes = figure.subplots(1, len(KINDS))
    for ax, (kind, label) in zip(axes, KINDS.items(), strict=True):
        names = dict.fromkeys(row['mixer'] for row in rows)
        for marker, name in zip('os^Dv<>PX*', names, strict=False):
            ax.plot(*curve(rows, name, kind), marker=marker, markersize=4, label=name)
        ax.set_xscale('log', base=2)
        ax.set_yscale('log')
        ax.set_xlabel('length T, tokens')
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_parser(__doc__, DEFAULTS)
    parser.add_argument('--mixers', nargs='+', metavar='MIXER', help=MIXER_NAMES)
    parser.add_argument(
        '--lengths', type=positive_int, nargs='+', metavar='T', help='sequence lengths'
    )
    for name, what in dict(
        tokens='tokens per batch', dims='width D', heads='number of heads'
    ).items():
        parser.add_argument(f'--{name}', type=positive_int, help=what)
    parser.add_argument(
        '--patience',
        type=float,
        default=60.0,
        help='maximum seconds of a measurement; default %(default)s',
    )
    parser.add_argument(
        '--kinds', nargs='+', choices=KINDS, default=list(KINDS), help='kinds of cost; default: all'
    )
    add_clock(parser)
    parser.add_argument('--png', type=Path, help='write a picture to this file')
    args = parser.parse_args(arguments)
    fill_in(parser, args, DEFAULTS)
    for name in args.mixers:
        with named_in_errors(parser, f'--mixers {name} with --dims {args.dims}'):
            check_mixer(name, args.dims, args.heads)
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    set_up_torch(args)
    for name in args.mixers:
        check(name, args)
    print(f'measuring {", ".join(args.kinds)}', file=sys.stderr)
    rows = measure(args)
    write_json(args.json, rows, args)
    print('\n'.join(summary(rows)))
    if args.png:
        about = environment(args)
        title = 'D = {dims}, heads: {heads}'.format(**about['settings'])
        plot(rows, args.png, f'{title}, {about["device_name"]}')


if __name__ == '__main__':
    main()
