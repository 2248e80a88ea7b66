"""Measure the gap of greedy tours to near-optimal ones.

    python examples/routing/evaluate.py work_dirs/tsp20_aft/model.pth \
        --optimal examples/routing/results/optimal_20.json examples/routing/results/optimal_50.json

Two numbers per size: the greedy tour from the first point, and the best of the greedy tours from
every point.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from model import TourModel
from oracle import test_instances
from problems import MODELS


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('checkpoint', type=Path)
    parser.add_argument('--optimal', type=Path, nargs='+', required=True, help='from oracle.py')
    parser.add_argument('--batch-size', type=int, default=50, help='default %(default)s')
    parser.add_argument('--json', type=Path, help='write the gaps to this file')
    return parser.parse_args(arguments)


@torch.no_grad()
def greedy_lengths(model: TourModel, instances: torch.Tensor, points: int) -> torch.Tensor:
    """Return the lengths [B, N] of the greedy tours from each of the points."""
    starts = torch.arange(points).expand(len(instances), -1)
    return model.costs(instances, model.roll_out(model.encode(instances), starts, sample=False))


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    torch.set_num_threads(1)
    saved = torch.load(args.checkpoint, weights_only=True)
    settings = saved['settings']
    problem = settings.get('problem', 'tsp')
    model = MODELS[problem](settings['mixer'], settings['embed_dims'], settings['layers']).eval()
    model.load_state_dict(saved['state_dict'])
    rows = []
    for path in args.optimal:
        optimal = json.loads(path.read_text())
        lengths = torch.tensor(optimal['lengths'])
        if optimal.get('problem', 'tsp') != problem:
            raise SystemExit(
                f'Error: {path} must have costs of {problem}, got {optimal["problem"]}'
            )
        instances = test_instances(optimal['points'], len(lengths), optimal['seed'], problem)
        begun = time.process_time()
        parts = instances.split(args.batch_size)
        found = torch.cat([greedy_lengths(model, x, optimal['points']) for x in parts])
        row = dict(points=optimal['points'], instances=len(instances))
        for name, theirs in (('one_start', found[:, 0]), ('all_starts', found.amin(1))):
            row[name] = round(theirs.mean().item(), 4)
            row[f'gap_{name}_percent'] = round(100 * (theirs / lengths - 1).mean().item(), 3)
        row['optimal'] = optimal['mean']
        row['cpu_seconds'] = round(time.process_time() - begun, 1)
        print(row, flush=True)
        rows.append(row)
    if args.json is not None:
        args.json.write_text(json.dumps(dict(training=settings, rows=rows), indent=1) + '\n')


if __name__ == '__main__':
    main()
