"""Compare AFT-full with a bias per sample to ``exp(w) @ exp(k)``.

    python tools/benchmarks/pair_bias.py --json docs/results/ops/pair_bias.json

Solvers of routing problems write AFT-full with a bias [B, N, N] as two products of exponentials,
and replace the NaN that overflow leaves by 0. The first table shows where that is right, against
float64. The second shows the ratios of time and peak memory to the solvers' form, which computes
each exponential twice, and to the same with each exponential once. A wrong result is not timed.
"""

import argparse
from pathlib import Path

from arguments import add_clock, positive_int

# Samples, more samples for memory (which is counted in pages), points.
SIZES = [
    (256, 4096, 20),
    (64, 1024, 50),
    (64, 512, 100),
    (16, 128, 200),
    (4, 32, 500),
    (2, 8, 1000),
]
CHANNELS = 128
TOLERANCE = 2e-5
MODES = ('training', 'inference')


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=positive_int, default=15, help='default %(default)s')
    parser.add_argument('--threads', type=positive_int, default=1, help='default %(default)s')
    add_clock(parser, 'cpu')
    parser.add_argument(
        '--quick', action='store_true', help='the smallest size only, without memory'
    )
    parser.add_argument('--json', type=Path, help='write rows and environment to this file')
    return parser.parse_args(arguments)


if __name__ == '__main__':
    parse_args()  # before the slow imports

from collections.abc import Callable, Sequence

import torch
from measuring import added_peak, in_fresh_process, interleaved, ratio
from record import write_json
from torch import Tensor

from aft_mm import ops
from aft_mm.ops.kernel_check import using


def two_products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    numerator = torch.exp(bias) @ (torch.exp(key) * value)
    mixed = numerator / (torch.exp(bias) @ torch.exp(key))
    return torch.sigmoid(query) * torch.nan_to_num(mixed)


def exponentials_once(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    weights, exp_key = torch.exp(bias), torch.exp(key)
    mixed = (weights @ (exp_key * value)) / (weights @ exp_key)
    return torch.sigmoid(query) * torch.nan_to_num(mixed)


def run(function: Callable, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad((output * cotangent.to(output)).sum(), leaves)]


def errors(got: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    """Return the largest error of output and gradients over the largest entry, ∞ for NaN."""
    found = []
    for a, b in zip(got, exact, strict=True):
        error = ((a.double() - b).abs().max() / b.abs().max().clamp_min(1.0)).item()
        found.append(error if error == error else float('inf'))
    return found


def make_inputs(samples: int, points: int, channels: int) -> list[Tensor]:
    """Return query, key, value, and as bias the negative scaled distances of random points."""
    torch.manual_seed(0)
    places = torch.rand(samples, points, 2)
    bias = -torch.tensor(points).log2() * torch.cdist(places, places)
    return [*torch.randn(3, samples, points, channels).unbind(), bias]


def cases() -> dict[str, list[Tensor]]:
    query, key, value, bias = make_inputs(4, 30, 16)
    spike, far = key.clone(), bias.clone()
    spike[:, 3] += 95
    far[:, :5] -= 110
    return {
        'distances': [query, key, value, bias],
        'distances, scaled by 30': [query, key, value, 30 * bias],
        'rows of −110: every weight is 0': [query, key, value, far],
        'bias + 95: infinite weights': [query, key, value, bias + 95],
        'one key + 95: infinite terms': [query, spike, value, bias],
        'keys − 110: every term is 0': [query, key - 110, value, bias],
        'bias of ±1e4': [query, key, value, 1e4 * torch.randn_like(bias)],
        'keys of ±1e4': [query, 1e4 * key, value, bias],
        'bias and keys of ±1e4': [query, 1e4 * key, value, 1e4 * torch.randn_like(bias)],
    }


def compare_values() -> list[dict]:
    rows = []
    for name, inputs in cases().items():
        with using('reference'):
            exact = run(ops.aft_full, [x.double() for x in inputs])
        theirs, ours = (errors(run(f, inputs), exact) for f in (two_products, ops.aft_full))
        if max(ours) > TOLERANCE:
            raise SystemExit(f'Error: wrong result for {name}: errors {ours}')
        finite = [None if x == float('inf') else x for x in theirs]  # JSON has no infinity
        rows.append(dict(case=name, theirs=finite, ours=ours))
        shown = [f'{x[0]:.1e} {max(x[1:]):.1e}' for x in (theirs, ours)]
        print(f'{name:<34} theirs {shown[0]}   ours {shown[1]}', flush=True)
    return rows


def train(function: Callable, inputs: Sequence[Tensor]) -> None:
    torch.autograd.grad(function(*inputs).sum(), inputs)


FORMS: dict[str, Callable] = {
    'ours': ops.aft_full,
    'theirs': two_products,
    'once': exponentials_once,
}


def peak(form: str, size: tuple[int, int, int]) -> float:
    """Return the peak memory of a training pass in MiB, without its inputs."""
    torch.set_num_threads(1)
    function = FORMS[form]
    small = [x.requires_grad_() for x in make_inputs(2, size[1], size[2])]
    train(function, small)  # loads libraries
    inputs = [x.requires_grad_() for x in make_inputs(*size)]
    return added_peak(lambda: train(function, inputs))


def compare_costs(args: argparse.Namespace) -> list[dict]:
    rows = []
    for samples, memory_samples, points in SIZES:
        size = samples, points, CHANNELS
        inputs = [x.requires_grad_() for x in make_inputs(*size)]
        with using('reference'):
            exact = run(ops.aft_full, [x[:1].double() for x in inputs])
        if max(errors(run(ops.aft_full, [x[:1] for x in inputs]), exact)) > TOLERANCE:
            raise SystemExit(f'Error: wrong result at {size}')
        calls: dict[tuple[str, str], Callable] = {}
        for form, function in FORMS.items():
            calls[form, 'training'] = lambda x=inputs, f=function: train(f, x)
            calls[form, 'inference'] = torch.no_grad()(lambda x=inputs, f=function: f(*x))
        times = interleaved(calls, args.rounds, clock=args.clock)
        row = dict(zip(('samples', 'points', 'channels'), size, strict=True))
        peaks = {}
        if not args.quick:
            memory_size = memory_samples, points, CHANNELS
            peaks = {form: in_fresh_process(peak, form, memory_size) for form in FORMS}
            row.update(memory_samples=memory_samples, mib=peaks)
        for name in ('theirs', 'once'):
            found = {f'{x}_time': ratio(times, ('ours', x), (name, x)) for x in MODES}
            if peaks:
                found['memory'] = peaks['ours'] / peaks[name]
            row[name] = found
            shown = ', '.join(f'{k} {v:.2f}' for k, v in found.items())
            print(f'{size}: ours over {name}: {shown}', flush=True)
        rows.append(row)
        if args.quick:
            break
    return rows


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    torch.set_num_threads(args.threads)
    args.device = 'cpu'
    values = compare_values()
    write_json(args.json, compare_costs(args), args, values=values)


if __name__ == '__main__':
    main()
