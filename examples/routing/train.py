"""Train a model of tours by policy gradient with a shared baseline.

    python examples/routing/train.py --mixer aft --points 20 --seed 0 --out work_dirs/tsp20_aft

Each instance gets a tour from several starts, and the mean length of its tours is the baseline of
each of them (POMO, arXiv 2010.16016).
"""

import argparse
import json
import time
from pathlib import Path

import torch
from model import MIXERS
from problems import MODELS


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--mixer', choices=MIXERS, default='aft')
    parser.add_argument('--problem', choices=MODELS, default='tsp')
    parser.add_argument('--points', type=int, default=20, help='points N; default %(default)s')
    parser.add_argument('--starts', type=int, help='tours per instance; default N')
    parser.add_argument('--batch-size', type=int, default=64, help='instances; default %(default)s')
    parser.add_argument('--iterations', type=int, default=4000, help='default %(default)s')
    parser.add_argument('--lr', type=float, default=1e-3, help='default %(default)s')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--embed-dims', type=int, default=64)
    parser.add_argument('--layers', type=int, default=3)
    parser.add_argument('--init', type=Path, help='checkpoint to start from')
    parser.add_argument('--log-every', type=int, default=100, help='iterations per line of the log')
    parser.add_argument('--out', type=Path, required=True, help='folder of model.pth and log.jsonl')
    return parser.parse_args(arguments)


def make_starts(batch: int, points: int, count: int) -> torch.Tensor:
    """Return `count` different starts [B, P] per instance; all points if there are as many."""
    if count == points:
        return torch.arange(points).expand(batch, -1)
    return torch.rand(batch, points).argsort(-1)[:, :count]


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    model = MODELS[args.problem](args.mixer, args.embed_dims, args.layers)
    if args.init is not None:
        model.load_state_dict(torch.load(args.init, weights_only=True)['state_dict'])
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, args.iterations, pct_start=0.05, anneal_strategy='cos'
    )
    args.out.mkdir(parents=True, exist_ok=True)
    log = (args.out / 'log.jsonl').open('w')
    settings = {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    settings['parameters'] = sum(p.numel() for p in model.parameters())
    log.write(json.dumps(settings) + '\n')
    begun, cpu_begun, lengths_seen, best_seen = time.time(), time.process_time(), 0.0, 0.0
    for iteration in range(1, args.iterations + 1):
        instances = model.sample(args.batch_size, args.points)
        starts = make_starts(args.batch_size, args.points, args.starts or args.points)
        encoded = model.encode(instances)
        tours = model.roll_out(encoded, starts, sample=True)
        lengths = model.costs(instances, tours)
        advantage = lengths - lengths.mean(1, keepdim=True)
        loss = (advantage * model.log_probabilities(encoded, tours)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        lengths_seen += lengths.mean().item() / args.log_every
        best_seen += lengths.amin(1).mean().item() / args.log_every
        if iteration % args.log_every == 0:
            row = dict(
                iteration=iteration,
                length=round(lengths_seen, 4),
                best_length=round(best_seen, 4),
                seconds=round(time.time() - begun, 1),
                cpu_seconds=round(time.process_time() - cpu_begun, 1),
            )
            log.write(json.dumps(row) + '\n')
            log.flush()
            print(row, flush=True)
            lengths_seen = best_seen = 0.0
            checkpoint = dict(state_dict=model.state_dict(), settings=settings)
            torch.save(checkpoint, args.out / 'model.pth')
    log.close()


if __name__ == '__main__':
    main()
