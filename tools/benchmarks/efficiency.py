"""Cost of causal decoders against the length of the sequence: the papers' efficiency figures.

Time of forward, of forward and backward, their peak memory, and time per token of decoding (prompt
in one pass, then step by step), for decoders that differ in the token mixer. Lengths and mixers
take turns in one process; peak memory is that of a process of its own. The slope of log cost over
log length is printed: 1 is linear, 2 quadratic.

    python tools/benchmarks/efficiency.py --json out.json --png out.png

A mixer whose parallel forward disagrees with its own steps, or with itself in float64 under the
oracle backend, stops the run before anything is timed. A cell that would take longer than
`--patience` seconds, by the cell before it and a quadratic law, is left out and reads null.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import torch
from decoders import VOCABULARY, build, infer, peak_memory, train_step
from memory import in_fresh_process
from timing import require_close, write_json

from aft_mm.ops.dispatch import ENVIRONMENT_VARIABLE

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402 - the backend comes first

KINDS = {
    'forward_ms': 'forward, ms',
    'training_ms': 'forward + backward, ms',
    'forward_mib': 'peak memory, forward, MiB',
    'training_mib': 'peak memory, forward + backward, MiB',
    'decoding_ms': 'decoding, ms per token',
}


def check(name: str, dims: int) -> None:
    """Hold the decoder against itself step by step and against the float64 oracle."""
    length = 96
    model = build(name, length, dims, 1).eval()
    tokens = torch.randint(VOCABULARY, (2, length))
    parallel = infer(model, tokens)
    hidden, state = model.prefill(tokens[:, :40], torch.tensor([40, 40]))
    rows = [hidden]
    for t in range(40, length - 1):
        hidden, state = model.step(tokens[:, t], state)
        rows.append(hidden)
    require_close(f'{name} step by step', torch.stack(rows, 1), parallel[:, 40:])
    os.environ[ENVIRONMENT_VARIABLE] = 'reference'
    require_close(name, parallel, infer(model.double(), tokens))
    del os.environ[ENVIRONMENT_VARIABLE]


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def sweep(
    make: Callable[[str, int], Callable[[], object]], args: argparse.Namespace
) -> dict[tuple[str, int], float]:
    """Median seconds of ``make(mixer, length)()`` in turns, without cells beyond the patience."""
    calls, last = {}, {}
    for length in args.lengths:
        for name in args.mixers:
            before = last.get(name)
            if before is None or before[1] * (length / before[0]) ** 2 <= args.patience:
                call = make(name, length)
                last[name] = (length, seconds(call))
                calls[name, length] = call
    times: dict[tuple[str, int], list[float]] = {cell: [] for cell in calls}
    for done in range(args.rounds):
        for cell, call in calls.items():
            times[cell].append(seconds(call))
        print(f'\r  round {done + 1}/{args.rounds}', end='', file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return {cell: statistics.median(values) for cell, values in times.items()}


def decoding(args: argparse.Namespace) -> dict[tuple[str, int], float]:
    """Median seconds of a step at each position, positions and mixers in turn."""
    times: dict[tuple[str, int], list[float]] = {}
    states = {}
    for name in args.mixers:
        model = build(name, max(args.positions) + args.steps + 1, args.dims, 1).eval()
        for position in args.positions:
            tokens = torch.randint(VOCABULARY, (args.batch, position))
            lengths = torch.full((args.batch,), position)
            states[name, position] = (model, model.prefill(tokens, lengths)[1])
            times[name, position] = []
    token = torch.randint(VOCABULARY, (args.batch,))
    for _ in range(args.steps):
        for cell, (model, state) in states.items():
            start = time.perf_counter()
            _, state = model.step(token, state)
            times[cell].append(time.perf_counter() - start)
            states[cell] = (model, state)
    return {cell: statistics.median(values) for cell, values in times.items()}


def measure(args: argparse.Namespace) -> list[dict]:
    """One row per mixer and length or position."""
    models = {(n, t): build(n, t, args.dims, 1) for n in args.mixers for t in args.lengths}

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(VOCABULARY, (1, length))

    cells: dict[tuple[str, int], dict] = {}

    def record(kind: str, values: dict[tuple[str, int], float], scale: float = 1.0) -> None:
        for cell, value in values.items():
            cells.setdefault(cell, {})[kind] = value * scale

    print('forward', file=sys.stderr)
    record('forward_ms', sweep(lambda n, t: partial(infer, models[n, t], tokens(t)), args), 1e3)
    print('forward + backward', file=sys.stderr)
    timed = sweep(lambda n, t: partial(train_step, models[n, t], tokens(t)), args)
    record('training_ms', timed, 1e3)
    print('peak memory', file=sys.stderr)
    sizes = (args.dims, 1, 1, args.threads)  # one layer, one sequence
    for run, kind in ((infer, 'forward_mib'), (train_step, 'training_mib')):
        record(kind, {cell: in_fresh_process(peak_memory, run, *cell, *sizes) for cell in timed})
    print('decoding', file=sys.stderr)
    record('decoding_ms', decoding(args), 1e3)
    return [
        dict(mixer=name, length=length, **{kind: values.get(kind) for kind in KINDS})
        for (name, length), values in sorted(cells.items())
    ]


def curve(rows: list[dict], mixer: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and costs of a mixer where they were measured."""
    points = [(r['length'], r[kind]) for r in rows if r['mixer'] == mixer and r[kind] is not None]
    return tuple(np.array(points).T) if points else (np.array([]), np.array([]))


def summary(rows: list[dict]) -> list[str]:
    """The slope of log cost over log length, or for decoding last over first position."""
    lines = []
    for mixer in dict.fromkeys(row['mixer'] for row in rows):
        for kind, label in KINDS.items():
            lengths, costs = curve(rows, mixer, kind)
            if len(lengths) < 2:
                continue
            if kind == 'decoding_ms':
                first, last = lengths[[0, -1]]
                text = f'{costs[-1] / costs[0]:5.2f} x from position {first:.0f} to {last:.0f}'
            else:
                slope = np.polyfit(np.log(lengths), np.log(costs), 1)[0]
                text = f'slope {slope:5.2f}'
            lines.append(f'{mixer:<16}{label:<40}{text}')
    return lines


def plot(rows: list[dict], path: Path, title: str) -> None:
    """One panel per kind of cost, both axes logarithmic but for decoding's."""
    figure, axes = plt.subplots(1, len(KINDS), figsize=(4 * len(KINDS), 3.8), layout='constrained')
    for ax, (kind, label) in zip(axes, KINDS.items(), strict=True):
        for marker, mixer in zip('os^Dv<>', dict.fromkeys(r['mixer'] for r in rows), strict=False):
            lengths, costs = curve(rows, mixer, kind)
            if len(lengths):
                ax.plot(lengths, costs, marker=marker, markersize=4, label=mixer)
        ax.set_xscale('log', base=2)
        if kind == 'decoding_ms':
            ax.set_ylim(bottom=0)
        else:
            ax.set_yscale('log')
        ax.set_xlabel('position, tokens' if kind == 'decoding_ms' else 'length T, tokens')
        ax.set_title(label, fontsize=10)
        ax.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        '--mixers', nargs='+', default=['aft-simple', 'aft-local-32', 'aft-local-256', 'softmax']
    )
    parser.add_argument('--lengths', type=int, nargs='+', default=[2**i for i in range(10, 17)])
    parser.add_argument('--positions', type=int, nargs='+', default=[64, 256, 1024, 4096])
    parser.add_argument('--steps', type=int, default=100, help='decoding steps at each position')
    parser.add_argument('--batch', type=int, default=4, help='sequences of decoding')
    parser.add_argument('--dims', type=int, default=256)
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--patience', type=float, default=30.0, help='seconds of a cell at most')
    parser.add_argument('--threads', type=int, default=os.cpu_count())
    parser.add_argument('--json', type=Path, help='write rows and the environment here')
    parser.add_argument('--png', type=Path, help='draw them here')
    parser.add_argument('--replot', type=Path, metavar='JSON', help='draw an earlier run instead')
    return parser.parse_args()


def main() -> None:
    """Check, measure, print slopes, draw."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    if args.replot:
        rows = json.loads(args.replot.read_text())['rows']
    else:
        for name in args.mixers:
            check(name, args.dims)
        rows = measure(args)
        settings = {k: v for k, v in vars(args).items() if k not in ('json', 'png', 'replot')}
        write_json(args.json, rows, **settings)
    print('\n'.join(summary(rows)))
    if args.png:
        plot(rows, args.png, f'decoder of one layer, D = {args.dims}, {args.threads} CPU threads')


if __name__ == '__main__':
    main()
