"""Measure the recall of LSH attention: the exact attention weight of the tokens it sees.

    python tools/benchmarks/lsh_recall.py --json out.json

Tokens are N(0, 1), keys a random projection of deviation `--lengths` times 1/√D. Recall is the mean
weight that exact causal shared-QK attention gives to the tokens of all rounds. Share is their part
of the previous tokens, the recall of a random choice. The same numbers are given for Reformer's
chunks of the sorted tokens, with the ratio of visible pairs.
"""

import argparse
from pathlib import Path

from arguments import positive_int


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = dict(
        tokens=(1024, 'sequence length'),
        dims=(256, 'width D'),
        heads=(4, 'number of heads'),
        buckets=(32, 'number of buckets'),
        chunk=(32, 'tokens per chunk'),
    )
    for name, (default, what) in sizes.items():
        what = f'{what}; default %(default)s'
        parser.add_argument(f'--{name}', type=positive_int, default=default, help=what)
    parser.add_argument(
        '--lengths', type=float, nargs='+', default=[4.0, 16.0, 64.0], help='lengths of the keys'
    )
    parser.add_argument('--json', type=Path, help='write rows and environment to this file')
    return parser.parse_args(arguments)


if __name__ == '__main__':
    parse_args()  # before the slow imports

import torch
import torch.nn.functional as F
from record import write_json
from torch import Tensor, nn

from aft_mm.layers import LSHAttention

ROUNDS = (1, 2, 4, 8)


def seen(buckets: Tensor, chunk_size: int) -> Tensor:
    """Return the visible pairs of buckets [h, rounds, T] as bool [h, T, T].

    A token sees the last chunk_size tokens of its bucket in any round, and itself.
    """
    tokens = buckets.shape[-1]
    same = (buckets.unsqueeze(-1) == buckets.unsqueeze(-2)).tril_()
    # The number of tokens of its bucket after s and up to t.
    after = same.sum(-1, keepdim=True) - same.cumsum(-1)
    return (same & (after <= chunk_size)).any(1) | torch.eye(tokens, dtype=torch.bool)


def seen_in_chunks(buckets: Tensor, chunk_size: int) -> Tensor:
    """Return :func:`seen` for Reformer: same bucket, in the same chunk or the previous one."""
    tokens = torch.arange(buckets.shape[-1])
    token = (buckets * len(tokens) + tokens).argsort(-1)
    chunk = torch.empty_like(token).scatter_(-1, token, tokens.expand_as(token)) // chunk_size
    same = buckets.unsqueeze(-1) == buckets.unsqueeze(-2)
    distance = chunk.unsqueeze(-1) - chunk.unsqueeze(-2)
    visible = (same & (distance >= 0) & (distance <= 1)).any(1).tril_()
    return visible | torch.eye(len(tokens), dtype=torch.bool)


def exact_weights(key: Tensor) -> Tensor:
    """Return causal shared-QK softmax [h, T, T] of keys [h, T, d], without a token itself."""
    logits = key @ F.normalize(key, dim=-1).mT * key.shape[-1] ** -0.5
    visible = torch.ones(logits.shape[-2:], dtype=torch.bool).tril_(-1)
    return logits.masked_fill(~visible, -torch.inf).softmax(-1)[:, 1:]


def recall(length: float, rounds: int, args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    x = torch.randn(1, args.tokens, args.dims)
    weight = torch.randn(args.dims, args.dims) * length / args.dims**0.5
    mixer = LSHAttention(args.dims, args.heads, rounds, args.buckets, args.chunk, causal=True)
    nn.init.zeros_(mixer.key.bias)
    with torch.no_grad():
        mixer.key.weight.copy_(weight)
        key = mixer.key(x).unflatten(2, (args.heads, -1)).transpose(1, 2)
        buckets = mixer.buckets(key)[0]
        found = seen(buckets, args.chunk)[:, 1:]
        chunked = seen_in_chunks(buckets, args.chunk)[:, 1:]
        weights = exact_weights(key[0])
    before = torch.arange(1, args.tokens)

    def measure(visible: Tensor) -> tuple[float, float]:
        share = (visible.sum(-1) - 1) / before
        return (weights * visible).sum(-1).mean().item(), share.mean().item()

    ours, theirs = measure(found), measure(chunked)
    pairs = (found.sum() - found.shape[0] * len(before)) / (
        chunked.sum() - found.shape[0] * len(before)
    )
    return dict(
        recall=ours[0],
        share=ours[1],
        chunk_recall=theirs[0],
        chunk_share=theirs[1],
        pairs_over_chunks=pairs.item(),
    )


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    rows = []
    for length in args.lengths:
        for rounds in ROUNDS:
            row = dict(length=length, rounds=rounds, **recall(length, rounds, args))
            rows.append(row)
            print(
                f'keys {length:g}, rounds {rounds}: recall {row["recall"]:.3f}, '
                f'share {row["share"]:.3f}; in chunks {row["chunk_recall"]:.3f}, '
                f'{row["chunk_share"]:.3f}; pairs {row["pairs_over_chunks"]:.2f}'
            )
    args.device = 'cpu'
    write_json(args.json, rows, args)


if __name__ == '__main__':
    main()
