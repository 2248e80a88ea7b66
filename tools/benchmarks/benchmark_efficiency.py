"""Measure the cost of causal decoders by sequence length: the efficiency figures of the papers.

Measured are time and peak memory of forward, and of forward and backward, and the time per token of
decoding.

    python tools/benchmarks/benchmark_efficiency.py --json out.json --png out.png
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from arguments import DTYPES, MIXER_NAMES, common_parser, named_in_errors, positive_int
from decoders import Run, build, check_mixer, cpu_peak, infer, random_tokens, train_step
from measuring import added_peak, both_clocks, in_fresh_process, seconds, wall_seconds
from parity import DECODER_TOLERANCE, require_close
from record import environment, fill_in, set_up_torch, write_json

from aft_mm.models.decoding.step_graph import make_steps
from aft_mm.ops.kernel_check import using
from aft_mm.visualization.figures import new_figure

KINDS = {
    'forward_ms': 'forward, ms',
    'training_ms': 'forward + backward, ms',
    'forward_mib': 'peak memory, forward, MiB',
    'training_mib': 'peak memory, forward + backward, MiB',
    'decoding_ms': 'decoding, ms per token',
}
# Only in the JSON: on a GPU the times above are those of the kernels.
WALL_KINDS = ('forward_wall_ms', 'training_wall_ms')
DECODED_SEQUENCES = 4
LOCAL = ['aft-local-32', 'aft-local-256']
DEFAULTS = {
    'cpu': dict(
        mixers=['aft-simple', *LOCAL, 'softmax'],
        lengths=[2**i for i in range(10, 17)],
        positions=[64, 256, 1024, 4096],
        dims=[256],
        layers=1,
        heads=4,
        batch=1,
        dtype='float32',
        rounds=3,
    ),
    'cuda': dict(
        # The state of AFT-full is as long as the position table, and may exceed the memory.
        mixers=['aft-simple', *LOCAL, 'aft-local-hard-256', 'aft-conv', 'softmax', 'aft-full'],
        lengths=[2**i for i in range(9, 17)],
        positions=[512, 2048, 8192, 32768],
        dims=[256, 1024],
        layers=12,
        heads=8,
        batch=4,
        dtype='bfloat16',
        rounds=10,
    ),
}
SEVERAL = dict(
    lengths='sequence lengths of forward and backward',
    positions='positions at which decoding is timed',
    dims='widths D',
)
SINGLE = dict(
    layers='number of layers',
    heads='number of heads of softmax attention and AFT-conv',
    batch='sequences per batch of forward and backward',
)


def caption(about: dict) -> str:
    settings = 'decoders, layers: {layers}, batch: {batch}, {dtype}'.format(**about['settings'])
    return f'{settings}, {about["device_name"]}'


Cell = tuple[str, int]


def check(name: str, dims: int, args: argparse.Namespace) -> None:
    length, allowed = 96, DECODER_TOLERANCE[args.dtype]
    model = build(name, length, dims, 1, args.heads).to(args.device, getattr(torch, args.dtype))
    model.eval()
    tokens = random_tokens(2, length, args.device)
    parallel = infer(model, tokens)
    hidden, state = model.prefill(tokens[:, :40], torch.tensor([40, 40], device=args.device))
    rows = [hidden]
    for t in range(40, length - 1):
        hidden, state = model.step(tokens[:, t], state)
        rows.append(hidden)
    require_close(f'{name} step by step', torch.stack(rows, 1), parallel[:, 40:], allowed)
    with using('reference'):
        require_close(name, parallel, infer(model.double(), tokens), allowed)


def sweep(
    make: Callable[[str, int], Callable[[], object]], args: argparse.Namespace, clock: str = 'wall'
) -> tuple[dict[Cell, float], dict[Cell, float]]:
    calls, last = {}, {}
    for length in args.lengths:
        for name in args.mixers:
            before = last.get(name, (length, 0.0))
            if before[1] * (length / before[0]) ** 2 > args.patience:
                continue
            call = make(name, length)
            try:
                call()
                last[name] = (length, seconds(call, args.device, clock))
                calls[name, length] = call
            except torch.OutOfMemoryError:
                last[name] = (length, float('inf'))
    clocks = both_clocks(calls, args.rounds, args.device, clock)
    device, wall = ({cell: statistics.median(v) for cell, v in times.items()} for times in clocks)
    return device, wall


def decoding(models: dict[str, torch.nn.Module], args: argparse.Namespace) -> dict[Cell, float]:
    times: dict[Cell, list[float]] = {}
    cells = {}
    token = random_tokens(DECODED_SEQUENCES, 1, args.device)[:, 0]
    for name, model in models.items():
        for position in args.positions:
            tokens = random_tokens(DECODED_SEQUENCES, position, args.device)
            lengths = torch.full((DECODED_SEQUENCES,), position, device=args.device)
            try:
                hidden, state = model.prefill(tokens, lengths)
                step = make_steps(model.step, token, hidden, state, args.steps)
            except torch.OutOfMemoryError:
                continue
            cells[name, position], times[name, position] = step, []
    for _ in range(args.steps):
        for cell, step in cells.items():
            times[cell].append(wall_seconds(partial(step, token), args.device))
    return {cell: statistics.median(values) for cell, values in times.items()}


def measure(dims: int, args: argparse.Namespace) -> list[dict]:
    sizes = (dims, args.layers, args.heads)
    longest = max(*args.lengths, max(args.positions) + args.steps + 1)
    models = {
        name: build(name, longest, *sizes).to(args.device, getattr(torch, args.dtype)).eval()
        for name in args.mixers
    }
    cells: dict[Cell, dict] = {}

    def record(kind: str, values: dict[Cell, float], scale: float = 1.0) -> None:
        for cell, value in values.items():
            cells.setdefault(cell, {})[kind] = value * scale

    def call(run: Run, name: str, length: int) -> Callable[[], object]:
        return partial(run, models[name], random_tokens(args.batch, length, args.device))

    def peak(run: Run, name: str, length: int) -> float:
        if torch.device(args.device).type == 'cuda':
            return added_peak(call(run, name, length), args.device)
        batch = (args.batch, args.threads, args.dtype)
        return in_fresh_process(cpu_peak, run, name, length, *batch, *sizes)

    for run, kind in ((infer, 'forward'), (train_step, 'training')):
        print(f'D = {dims}, {kind}', file=sys.stderr)
        times, walls = sweep(partial(call, run), args)
        record(f'{kind}_ms', times, 1e3)
        record(f'{kind}_wall_ms', walls, 1e3)
        record(f'{kind}_mib', {cell: peak(run, *cell) for cell in times})
    print(f'D = {dims}, decoding', file=sys.stderr)
    record('decoding_ms', decoding(models, args), 1e3)
    return [
        dict(mixer=name, dims=dims, length=length, **dict.fromkeys((*KINDS, *WALL_KINDS)) | values)
        for (name, length), values in sorted(cells.items())
    ]


def curve(rows: list[dict], mixer: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    chosen = [row for row in rows if row['mixer'] == mixer and row.get(kind) is not None]
    points = [(row['length'], row[kind]) for row in chosen]
    return tuple(np.array(points).T) if points else (np.array([]), np.array([]))


def by_dims(rows: list[dict]) -> dict[int, list[dict]]:
    return {d: [r for r in rows if r['dims'] == d] for d in sorted({r['dims'] for r in rows})}


def summary(rows: list[dict]) -> list[str]:
    lines = []
    for dims, part in by_dims(rows).items():
        for mixer in dict.fromkeys(row['mixer'] for row in part):
            for kind, label in KINDS.items():
                lengths, costs = curve(part, mixer, kind)
                if len(lengths) < 2:
                    continue
                if kind == 'decoding_ms':
                    first, last = lengths[[0, -1]]
                    text = f'{costs[-1] / costs[0]:5.2f} x from position {first:.0f} to {last:.0f}'
                else:
                    slope = np.polyfit(np.log(lengths), np.log(costs), 1)[0]
                    text = f'slope {slope:5.2f}'
                lines.append(f'D = {dims:<6}{mixer:<23} {label:<40}{text}')
    return lines


def plot(rows: list[dict], path: Path, title: str) -> None:
    widths = by_dims(rows)
    figure = new_figure(4 * len(KINDS), 3.6 * len(widths) + 0.3, title)
    grid = figure.subplots(len(widths), len(KINDS), squeeze=False)
    for axes, (dims, part) in zip(grid, widths.items(), strict=True):
        for ax, (kind, label) in zip(axes, KINDS.items(), strict=True):
            mixers = dict.fromkeys(r['mixer'] for r in part)
            for marker, mixer in zip('os^Dv<>PX*', mixers, strict=False):
                lengths, costs = curve(part, mixer, kind)
                if len(lengths):
                    ax.plot(lengths, costs, marker=marker, markersize=4, label=mixer)
            ax.set_xscale('log', base=2)
            if kind == 'decoding_ms':
                ax.set_ylim(bottom=0)
            else:
                ax.set_yscale('log')
            ax.set_xlabel('position, tokens' if kind == 'decoding_ms' else 'length T, tokens')
            ax.set_ylabel(label)
            ax.set_title(f'D = {dims}', fontsize=10)
            ax.grid(alpha=0.3)
        axes[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_parser(__doc__, DEFAULTS)
    parser.add_argument('--mixers', nargs='+', metavar='MIXER', help=MIXER_NAMES)
    for name, what in SEVERAL.items():
        parser.add_argument(f'--{name}', type=positive_int, nargs='+', metavar='N', help=what)
    for name, what in SINGLE.items():
        parser.add_argument(f'--{name}', type=positive_int, help=what)
    parser.add_argument(
        '--steps',
        type=positive_int,
        default=100,
        help='decoding steps per position; default %(default)s',
    )
    parser.add_argument('--dtype', choices=DTYPES, help='data type')
    parser.add_argument(
        '--patience',
        type=float,
        default=30.0,
        help='maximum seconds of a measurement; default %(default)s',
    )
    parser.add_argument('--png', type=Path, help='write a picture to this file')
    args = parser.parse_args(arguments)
    fill_in(parser, args, DEFAULTS)
    for name in args.mixers:
        for dims in args.dims:
            with named_in_errors(parser, f'--mixers {name} with --dims {dims}'):
                check_mixer(name, dims, args.heads)
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    set_up_torch(args)
    for dims in args.dims:
        for name in args.mixers:
            check(name, dims, args)
    rows = [row for dims in args.dims for row in measure(dims, args)]
    write_json(args.json, rows, args)
    print('\n'.join(summary(rows)))
    if args.png:
        plot(rows, args.png, caption(environment(args)))


if __name__ == '__main__':
    main()
