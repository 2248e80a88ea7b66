"""Costs of near-optimal tours: by LKH (`pip install elkai`), of CVRP by PyVRP (`pip install pyvrp`).

    python examples/routing/oracle.py --points 20 --instances 1000 --out results/optimal_20.json

Both are heuristics without a proof; at these sizes LKH is reported to find the optimum almost always.
"""

import argparse
import json
from pathlib import Path

import torch
from problems import CAPACITIES, MODELS, OTHER_CAPACITY

# LKH takes whole numbers.
UNITS = 1e5


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--problem', choices=MODELS, default='tsp')
    parser.add_argument('--points', type=int, default=20, help='points N; default %(default)s')
    parser.add_argument('--instances', type=int, default=1000, help='default %(default)s')
    parser.add_argument('--seed', type=int, default=1234, help='of the instances')
    parser.add_argument(
        '--runs', type=int, default=10, help='runs of LKH or of PyVRP; default %(default)s'
    )
    parser.add_argument('--out', type=Path, required=True, help='JSON file')
    return parser.parse_args(arguments)


def test_instances(points: int, instances: int, seed: int, problem: str = 'tsp') -> torch.Tensor:
    """Return random instances of the problem."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MODELS[problem].sample(instances, points)


def solve_tour(distances: torch.Tensor, runs: int) -> list[int]:
    """Return a tour by LKH."""
    import elkai  # not needed by readers of `test_instances`

    numbers = (distances * UNITS).round().int().tolist()
    return elkai.DistanceMatrix(numbers).solve_tsp(runs=runs)[:-1]


def solve_routes(instance: torch.Tensor, capacity: int, runs: int) -> float:
    """Return the cost of routes by PyVRP, after 100 iterations per run."""
    import pyvrp

    model = pyvrp.Model()
    model.add_vehicle_type(len(instance), capacity=capacity)
    places = [model.add_location(*x) for x in (instance[:, :2] * UNITS).tolist()]
    model.add_depot(places[0])
    for place, demand in zip(places[1:], instance[1:, 2], strict=True):
        model.add_client(place, delivery=round(demand.item() * capacity))
    distances = torch.cdist(instance[:, :2], instance[:, :2]) * UNITS
    for a, row in zip(places, distances.round().int().tolist(), strict=True):
        for b, distance in zip(places, row, strict=True):
            model.add_edge(a, b, distance=distance)
    stop = pyvrp.stop.MaxIterations(100 * runs)
    return model.solve(stop, display=False).cost() / UNITS


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    instances = test_instances(args.points, args.instances, args.seed, args.problem)
    if args.problem == 'cvrp':
        capacity = CAPACITIES.get(args.points, OTHER_CAPACITY)
        lengths = torch.tensor([solve_routes(x, capacity, args.runs) for x in instances])
    else:
        distances = torch.cdist(instances, instances) if args.problem == 'tsp' else instances
        tours = torch.tensor([solve_tour(x, args.runs) for x in distances])
        lengths = MODELS[args.problem].costs(instances, tours.unsqueeze(1)).squeeze(1)
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
