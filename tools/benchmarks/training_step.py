"""A training step of causal decoders that differ in the mixer: time and peak memory as ratios.

Defaults: T = 3072, D = 256, 4 layers, window 256, batch 2, float32. Forward and backward in turn in
one process; a ratio is the median over rounds of time(form) / time(AFT-local). Peak memory is that
of a process of its own. `bound` has all projections, the gate and the MLPs, but no mixing.

    python tools/benchmarks/training_step.py --json out.json

AFT-local that disagrees with its dense masked form, or causal scaled_dot_product_attention with
softmax attention written out, with the same weights, stops the run before anything is timed.
"""

import argparse
import os
import statistics
from functools import partial
from pathlib import Path

import torch
from decoders import VOCABULARY, build, peak_memory, train_step
from memory import in_fresh_process
from timing import interleaved, ratio, require_close, write_json


def main() -> None:
    """Check, time, measure memory, print ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--tokens', type=int, default=3072)
    parser.add_argument('--dims', type=int, default=256)
    parser.add_argument('--layers', type=int, default=4)
    parser.add_argument('--window', type=int, default=256)
    parser.add_argument('--batch', type=int, default=2)
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--threads', type=int, default=os.cpu_count())
    parser.add_argument('--json', type=Path, help='write rows and the environment here')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    local, dense = f'aft-local-{args.window}', f'dense-aft-local-{args.window}'
    sizes = (args.tokens, args.dims, args.layers)
    models = {name: build(name, *sizes) for name in (local, 'softmax', dense, 'bound')}
    sequence = torch.randint(VOCABULARY, (args.batch, args.tokens))
    with torch.no_grad():
        require_close(local, models[local](sequence), models[dense](sequence))
        written_out = build('dense-softmax', *sizes)
        require_close('softmax', models['softmax'](sequence), written_out(sequence))
    times = interleaved(
        {name: partial(train_step, model, sequence) for name, model in models.items()}, args.rounds
    )
    peaks = {
        name: in_fresh_process(peak_memory, train_step, name, *sizes, args.batch, args.threads)
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
    settings = {key: value for key, value in vars(args).items() if key != 'json'}
    write_json(args.json, rows, **settings)


if __name__ == '__main__':
    main()
