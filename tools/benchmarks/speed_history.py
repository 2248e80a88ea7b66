"""Append the CPU time of each op over that of an op of torch to a history, one line per commit.

    python tools/benchmarks/speed_history.py --json docs/results/benchmarks/speed.jsonl

The exit status is 1 if a ratio, twice in a row, is more than 1.1 times the median of the last five
lines of the same device, threads and torch, and more than all of them.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Iterable

import torch
from arguments import common_parser
from benchmark_ops import MODES, Form
from measuring import interleaved, ratio
from op_cases import RANK, BenchmarkCase, sized
from parity import Oracle, require_small
from record import device_name, fill_in, set_up_torch

from aft_mm.analysis.collect_runs import commit
from aft_mm.analysis.run_files import read_lines
from aft_mm.ops.cases import TOLERANCE, conv, full, hard, learned, local, simple

# The name of a reference in rivals.py, and the case that is divided by it.
CASES: dict[str, tuple[str, BenchmarkCase]] = {
    'aft_conv': ('depthwise', sized(conv((14, 14), (11, 11), 192, channels=192), 8)),
    'aft_simple': ('linear', sized(simple(1024, channels=256, causal=True), 4)),
    'aft_full': ('softmax', sized(full(196, channels=192), 8)),
    'aft_local': (
        'softmax-causal',
        sized(local(1024, 32, causal=True, rank=RANK, channels=256), 2),
    ),
    'aft_local_hard': ('softmax-causal', sized(hard(1024, 32, channels=256), 2)),
    'aft_local_learned': (
        'softmax-causal',
        sized(learned(1024, 32, causal=True, rank=RANK, channels=256), 2),
    ),
}
COMPARED = 5
KEPT = 60
ALLOWED = 1.1
DEFAULTS = {'cpu': dict(rounds=30), 'cuda': dict(rounds=30)}


def measure(ops: Iterable[str], args: argparse.Namespace) -> dict[str, float]:
    ratios = {}
    for op in ops:
        reference, case = CASES[op]
        tensors = case.tensors(torch.float32, args.device)
        own = Form(case, op, tensors, case, True)
        for name, error in Oracle.of(case, tensors).errors(case, tensors).items():
            require_small(f'{name} of {op}', error, TOLERANCE[torch.float32])
        other = Form.of(case, reference, tensors)
        for mode in MODES:
            calls = dict(own=own.once(mode), other=other.once(mode))
            times = interleaved(calls, args.rounds, args.device, clock='cpu')
            ratios[f'{op} {mode}'] = ratio(times, 'own', 'other')
    return ratios


def losses(ratios: dict[str, float], earlier: list[dict]) -> dict[str, float]:
    """Return how many times the usual ratio each lost name has."""
    lost = {}
    for name, value in ratios.items():
        known = [line['ratios'][name] for line in earlier if name in line['ratios']][-COMPARED:]
        if known and value > max(ALLOWED * (usual := statistics.median(known)), *known):
            lost[name] = value / usual
    return lost


def main(arguments: list[str] | None = None) -> int:
    parser = common_parser(__doc__, DEFAULTS)
    parser.set_defaults(device='cpu', threads=1)
    args = parser.parse_args(arguments)
    if not args.json:
        parser.error('argument --json: must be given')
    lines = list(read_lines(args.json).values()) if args.json.exists() else []
    fill_in(parser, args, DEFAULTS)
    set_up_torch(args)
    setting = dict(
        device=device_name(args.device), threads=args.threads, torch=str(torch.__version__)
    )
    earlier = [line for line in lines if setting.items() <= line.items()]
    ratios = measure(CASES, args)
    if lost := losses(ratios, earlier):
        again = measure(dict.fromkeys(name.partition(' ')[0] for name in lost), args)
        ratios |= {name: min(ratios[name], again[name]) for name in lost}
        lost = losses(ratios, earlier)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    rounded = {name: float(f'{value:.4g}') for name, value in ratios.items()}
    line = dict(name=now, commit=commit() or 'unknown', **setting, ratios=rounded)
    kept = [json.dumps(each) for each in [*lines, line][-KEPT:]]
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text('\n'.join(kept) + '\n', encoding='utf-8')
    for name, value in ratios.items():
        reference = CASES[name.partition(' ')[0]][0]
        print(f'{name:36} {value:7.3f} times {reference}')
    for name, times in lost.items():
        print(f'{name} takes {times:.2f} times its usual ratio', file=sys.stderr)
    return int(bool(lost))


if __name__ == '__main__':
    raise SystemExit(main())
