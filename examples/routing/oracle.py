"""Costs of near-optimal tours of the test instances, by LKH (`pip install elkai`).

    python examples/routing/oracle.py --points 20 --instances 1000 --out results/optimal_20.json

LKH is a heuristic without a proof; at these sizes it is reported to find the optimum almost always.
"""

import argparse
import json
from pathlib import Path

import torch
from problems import MODELS

# LKH takes whole numbers.
UNITS = 1e5


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--problem', choices=('tsp', 'atsp'), default='tsp')
    parser.add_argument('--points', type=int, default=20, help='points N; default %(default)s')
    parser.add_argument('--instances', type=int, default=1000, help='default %(default)s')
    parser.add_argument('--seed', type=int, default=1234, help='of the instances')
    parser.add_argument('--runs', type=int, default=10, help='runs of LKH; default %(default)s')
    parser.add_argument('--out', type=Path, required=True, help='JSON file')
    return parser.parse_args(arguments)


def test_instances(points: int, instances: int, seed: int, problem: str = 'tsp') -> torch.Tensor:
    """Return random instances of the problem."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[problem].sample(instances, points)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    import elkai  # not needed by readers of `test_instances`

    instances = test_instances(args.points, args.instances, args.seed, args.problem)
    distances = torch.cdist(instances, instances) if args.problem == 'tsp' else instances
    tours = [
        elkai.DistanceMatrix(x).solve_tsp(runs=args.runs)[:-1]
        for x in (distances * UNITS).round().int().tolist()
    ]
    costs = MODELS[args.problem].costs
    lengths = costs(instances, torch.tensor(tours).unsqueeze(1)).squeeze(1)
    content = dict(
        problem=args.problem,
        points=args.points,
        seed=args.seed,
        runs=args.runs,
        mean=round(lengths.mean().item(), 5),
        lengths=[round(x, 5) for x in lengths.tolist()],
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content) + '\n')
    print(f'{args.instances} instances of {args.points} points: mean length {content["mean"]}')


if __name__ == '__main__':
    main()
