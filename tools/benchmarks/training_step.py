"""Compare time and peak memory of a training step of causal decoders with different mixers.

Forward and backward are interleaved; a ratio is the median over rounds of ``time(form) /
time(AFT-local)``. `bound` has no mixing.
"""

import argparse
import statistics
from functools import partial

import torch
from arguments import DTYPES, common_parser, named_in_errors, positive_int
from decoders import build, check_mixer, cpu_peak, infer, random_tokens
from measuring import added_peak, in_fresh_process, interleaved, ratio
from parity import DECODER_TOLERANCE, require_close
from record import fill_in, set_up_torch, write_json
from torch import Tensor

HEADS = 4
DEFAULTS = dict(tokens=3072, dims=256, layers=4, window=256, batch=2, dtype='float32', rounds=5)


def amp_step(dtype: str, model: torch.nn.Module, tokens: Tensor) -> None:
    with mixed_precision(dtype, tokens.device):
        loss = model(tokens).square().mean()
    loss.backward()
    model.zero_grad(set_to_none=True)


def mixed_precision(dtype: str, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != 'float32')


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_parser(__doc__, {'any device': DEFAULTS})
    sizes = dict(
        tokens='sequence length T',
        dims='width D',
        layers='number of layers',
        window='window of AFT-local',
        batch='sequences per batch',
    )
    for name, what in sizes.items():
        parser.add_argument(f'--{name}', type=positive_int, help=what)
    parser.add_argument('--dtype', choices=DTYPES, help='data type')
    parser.set_defaults(**DEFAULTS)
    args = parser.parse_args(arguments)
    fill_in(parser, args)
    with named_in_errors(parser, '--dims'):
        check_mixer('softmax', args.dims, HEADS)
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    set_up_torch(args)
    local, dense = f'aft-local-{args.window}', f'dense-aft-local-{args.window}'
    sizes = (args.dims, args.layers, HEADS)

    def decoder(name: str) -> torch.nn.Module:
        return build(name, args.tokens, *sizes).to(args.device)

    models = {name: decoder(name) for name in (local, 'softmax', dense, 'bound')}
    sequence = random_tokens(args.batch, args.tokens, args.device)
    written_out = {local: models[dense], 'softmax': decoder('dense-softmax')}
    for name, other in written_out.items():
        with mixed_precision(args.dtype, sequence.device):
            results = infer(models[name], sequence), infer(other, sequence)
        require_close(name, *results, DECODER_TOLERANCE[args.dtype])
    step = partial(amp_step, args.dtype)
    calls = {name: partial(step, model, sequence) for name, model in models.items()}
    times = interleaved(calls, args.rounds, args.device)
    if torch.device(args.device).type == 'cuda':
        peaks = {name: added_peak(call, args.device) for name, call in calls.items()}
    else:
        batch = (args.batch, args.threads, 'float32')
        peaks = {
            name: in_fresh_process(cpu_peak, step, name, args.tokens, *batch, *sizes)
            for name in models
        }
    rows = []
    for name in models:
        row = dict(
            model=name,
            milliseconds=statistics.median(times[name]) * 1e3,
            time_over_local=ratio(times, name, local),
            peak_mib=peaks[name],
            peak_over_local=peaks[name] / peaks[local],
        )
        rows.append(row)
        print(
            f'{name:<20}{row["milliseconds"]:9.0f} ms, {row["time_over_local"]:5.2f} x AFT-local   '
            f'peak {row["peak_mib"]:8.0f} MiB, {row["peak_over_local"]:5.2f} x AFT-local'
        )
    write_json(args.json, rows, args)


if __name__ == '__main__':
    main()
