"""Measure the time to sample images: tables 1, 2, 4 and 5 of the linear-transformer paper.

The models are those of the paper in configs/image_ar, with random weights. Forms of a model:

- `steps`: with a state, one step per token;
- `compiled`: the same steps with torch.compile (CPU only);
- `stateless`: a forward pass over all previous tokens for each token, as for softmax and lsh in the
  paper.

The time of an image is estimated by a parabola through the medians at several positions. If it is
below `--patience`, whole images are timed as well; otherwise, and always for `stateless`, the row
is marked as an estimate.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from arguments import add_clock, common_parser, positive_int
from measuring import wall_seconds
from mmengine.config import Config
from parity import require_close
from record import ROOT, environment, fill_in, set_up_torch, write_json
from torch import Tensor
from torch.utils._pytree import tree_map_only

import aft_mm.models  # noqa: F401 - registers what is built below
from aft_mm.analysis.run_files import is_selection, selected
from aft_mm.models.decoding.step_graph import make_steps, step_layout
from aft_mm.registry import MODELS
from aft_mm.visualization.figures import new_figure

MNIST, CIFAR = '{}_1xb10-250e-logistic_mnist', '{}_1xb4-7d-logistic_cifar10'
CONFIGS = {
    'mnist': {
        'softmax': MNIST.format('transformer-l8-d256-h8'),
        'lsh-1': MNIST.format('lsh-1-l8-d256-h8'),
        'lsh-4': MNIST.format('lsh-4-l8-d256-h8'),
        'linear': MNIST.format('linear-l8-d256-h8'),
        'aft-simple': MNIST.format('aft-simple-l8-d256'),
        'aft-local': MNIST.format('aft-local-32-l8-d256'),
    },
    'cifar10': {
        'softmax': 'transformer-l16-d256-h8_1xb1-7d-logistic_cifar10',
        'lsh-1': CIFAR.format('lsh-1-l16-d256-h8'),
        'lsh-4': CIFAR.format('lsh-4-l16-d256-h8'),
        'linear': CIFAR.format('linear-l16-d256-h8'),
        'aft-simple': CIFAR.format('aft-simple-l16-d256'),
        'aft-local': CIFAR.format('aft-local-256-l16-d256'),
    },
}
FORMS = ('steps', 'compiled', 'stateless')
DEFAULTS = dict(
    data='mnist', mixers=list(CONFIGS['mnist']), forms=['steps', 'stateless'], batch=1, rounds=9
)


# Seconds per image at batch 1 on a CPU (tables 4 and 5), images per second of a batch on a GPU
# (tables 1 and 2), and seconds per image there. The paper's softmax and lsh have no state, its
# stateful-softmax a cache.
PAPER = {
    ('mnist', 'softmax', 'stateless'): (72.6, 0.45, 10.2),
    ('mnist', 'softmax', 'steps'): (7.4, 7.56, 10.4),
    ('mnist', 'lsh-1', 'stateless'): (46.0, 0.68, 19.2),
    ('mnist', 'lsh-4', 'stateless'): (112.0, 0.27, 55.8),
    ('mnist', 'linear', 'steps'): (5.5, 142.8, 7.3),
    ('cifar10', 'softmax', 'stateless'): (8651.4, 0.004, 300.1),
    ('cifar10', 'softmax', 'steps'): (71.9, 0.32, 70.4),
    ('cifar10', 'lsh-1', 'stateless'): (2318.9, 0.015, 221.6),
    ('cifar10', 'lsh-4', 'stateless'): (5263.7, 0.005, 683.9),
    ('cifar10', 'linear', 'steps'): (45.1, 17.85, 61.3),
}
# Consecutive tokens of a call, so that weights are in the processor cache as in real use.
TOKENS_PER_CALL = 8
# A `stateless` call is a forward pass, whose cost per image is constant, so few suffice.
STATELESS_ROUNDS, STATELESS_BATCH = 3, 4
POSITIONS = 5
# From this ratio of rates, the axis is logarithmic.
LOG_RANGE = 20
# Relative to the largest entry, for 16 layers in float32.
TOLERANCE = 1e-4
Cell = tuple[str, str, int | str]


def build(data: str, mixer: str, device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = Config.fromfile(ROOT / 'configs' / 'image_ar' / f'{CONFIGS[data][mixer]}.py')
    return MODELS.build(config.model).to(device).eval()


def random_tokens(model: torch.nn.Module, batch: int, length: int) -> Tensor:
    device = next(model.parameters()).device
    return torch.randint(256, (batch, length), device=device)


def check(name: str, form: str, model: torch.nn.Module) -> None:
    decoder, tokens = model.decoder, random_tokens(model, 2, 60)
    hidden, step = begin(model, form, tokens[:, :20], 40)
    rows = [hidden.clone()]
    rows += [step(tokens[:, t]).clone() for t in range(20, 59)]
    require_close(f'{name} by {form}', torch.stack(rows, 1), decoder(tokens)[:, 20:60], TOLERANCE)


def begin(model, form: str, prompt: Tensor, count: int, copies: int = 1) -> tuple[Tensor, Callable]:
    lengths = torch.full(prompt.shape[:1], prompt.shape[1], device=prompt.device)
    # Prompts of a batch would take minutes.
    hidden, state = tree_map_only(
        Tensor, lambda x: x.repeat_interleave(copies, 0), model.decoder.prefill(prompt, lengths)
    )
    token = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    return hidden, make_steps(model.decoder.step, token, hidden, state, count, form == 'compiled')


def token_call(model, form: str, batch: int, position: int, count: int) -> Callable[[], None]:
    if form == 'stateless':
        tokens = random_tokens(model, min(batch, STATELESS_BATCH), position)
        return lambda: model.head.sample(model.decoder(tokens)[:, -1])
    step = begin(model, form, random_tokens(model, 1, position), count, batch)[1]
    token = random_tokens(model, batch, 1)[:, 0]

    def call() -> None:
        for _ in range(TOKENS_PER_CALL):
            model.head.sample(step(token))

    return call


def part_calls(model, form: str, batch: int, count: int) -> dict[str, Callable[[], None]]:
    length = model.decoder.max_length
    hidden, step = begin(model, form, random_tokens(model, 1, length // 2), count, batch)
    hidden, token = hidden.clone(), random_tokens(model, batch, 1)[:, 0]
    layers = [m for m in model.decoder.layers.modules() if type(m) is torch.nn.Linear]
    inputs = [torch.randn(batch, m.in_features, device=hidden.device) for m in layers]

    def products() -> None:
        for x, layer in zip(inputs, layers, strict=True):
            F.linear(x, layer.weight, layer.bias)

    parts = dict(
        step=partial(step, token), products=products, head=partial(model.head.sample, hidden)
    )
    return {name: partial(repeat, call) for name, call in parts.items()}


def repeat(call: Callable[[], object]) -> None:
    for _ in range(TOKENS_PER_CALL):
        call()


def measure(args: argparse.Namespace) -> list[dict]:
    cases = [(mixer, form) for mixer in args.mixers for form in args.forms]
    models = {case: build(args.data, case[0], args.device) for case in cases}
    taken = (args.rounds + 2) * TOKENS_PER_CALL
    with ExitStack() as stack:
        for (_, form), model in models.items():
            columns = form == 'compiled'
            stack.enter_context(step_layout(model.decoder, columns))
        stack.enter_context(torch.inference_mode())
        compiling = {case: first_call(case, model) for case, model in models.items()}
        print('tokens at several positions', file=sys.stderr)
        steps, stateless = {}, {}
        for (mixer, form), model in models.items():
            last = model.decoder.max_length - taken - 1
            for position in np.linspace(1, last, POSITIONS).astype(int).tolist():
                call = token_call(model, form, args.batch, position, taken)
                (stateless if form == 'stateless' else steps)[mixer, form, position] = call
            if form != 'stateless':
                parts = part_calls(model, form, args.batch, taken)
                steps.update({(mixer, form, part): call for part, call in parts.items()})
        for call in (*steps.values(), *stateless.values()):
            call()
        seconds = {
            **in_turns(steps, args.rounds, args),
            **in_turns(stateless, STATELESS_ROUNDS, args),
        }
    rows = [row_of(case, models[case], seconds, compiling[case], args) for case in cases]
    time_whole_images(rows, models, args)
    return rows


def first_call(case: tuple[str, str], model: torch.nn.Module) -> float:
    start = time.perf_counter()
    mixer, form = case
    if form != 'stateless':
        check(mixer, form, model)
    return time.perf_counter() - start


def in_turns(calls: dict, rounds: int, args: argparse.Namespace) -> dict:
    times = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(wall_seconds(call, args.device, args.clock))
    return {name: statistics.median(values) for name, values in times.items()}


def row_of(case, model, seconds: dict[Cell, float], checked: float, args) -> dict:
    mixer, form = case
    scale = 1 / TOKENS_PER_CALL if form != 'stateless' else max(1, args.batch / STATELESS_BATCH)
    timed = {cell[2]: value * scale for cell, value in seconds.items() if cell[:2] == case}
    parts = {
        f'{part}_ms': 1e3 * timed.pop(part)
        for part in ('step', 'products', 'head')
        if part in timed
    }
    moved = 0 if form == 'stateless' else (args.rounds + 1) * TOKENS_PER_CALL / 2
    positions = np.array(list(timed)) + moved
    tokens = model.decoder.max_length
    parabola = np.polyfit(positions, list(timed.values()), 2)
    estimate = float(np.polyval(parabola, np.arange(tokens)).sum())
    return dict(
        data=args.data,
        mixer=mixer,
        form=form,
        batch=args.batch,
        tokens=tokens,
        config=CONFIGS[args.data][mixer],
        positions=positions.tolist(),
        token_ms=[1e3 * value for value in timed.values()],
        **parts,
        check_seconds=checked,
        estimated_seconds=estimate,
        seconds=None,
        paper=PAPER.get((args.data, mixer, 'steps' if form == 'compiled' else form)),
    )


def time_whole_images(rows: list[dict], models: dict, args: argparse.Namespace) -> None:
    calls = {}
    for row in rows:
        if row['form'] == 'stateless' or row['estimated_seconds'] > args.patience:
            continue
        case = row['mixer'], row['form']
        model = models[case]
        options = dict(batch_size=args.batch, seed=0, compiled=row['form'] == 'compiled')
        model.generate(12, **options)
        calls[case] = partial(model.generate, model.decoder.max_length, **options)
    print(f'whole images of {len(calls)} of {len(rows)} models', file=sys.stderr)
    seconds = in_turns(calls, args.images, args)
    for row in rows:
        row['seconds'] = seconds.get((row['mixer'], row['form']))


def total(row: dict) -> float:
    return row['estimated_seconds'] if row['seconds'] is None else row['seconds']


def summary(rows: list[dict]) -> list[str]:
    lines = []
    for row in rows:
        text = (
            f'{row["data"]:<8}{row["mixer"]:<11}{row["form"]:<9} batch {row["batch"]:<5}'
            f'{total(row):9.2f} s{"*" if row["seconds"] is None else " "}'
            f'{row["batch"] / total(row):10.4f} images/s'
        )
        if 'step_ms' in row:
            ratio = row['step_ms'] / row['products_ms']
            text += (
                f'   step {row["step_ms"]:7.2f} ms, products {row["products_ms"]:6.2f} '
                f'({ratio:4.2f} x), head {row["head_ms"]:5.2f}'
            )
        lines.append(text)
    return [*lines, '* estimated from the tokens at several positions']


def plot(rows: list[dict], path: Path, title: str) -> None:
    panels: dict[tuple, list[dict]] = {}
    for row in rows:
        panels.setdefault((row['data'], row['batch']), []).append(row)
    figure = new_figure(4.5 * len(panels), 3.8, title)
    grid = figure.subplots(1, len(panels), squeeze=False)
    for ax, ((data, batch), part) in zip(grid[0], panels.items(), strict=True):
        part = sorted(part, key=lambda row: row['batch'] / total(row))
        names = [f'{row["mixer"]}, {row["form"]}' for row in part]
        rates = [row['batch'] / total(row) for row in part]
        bars = ax.barh(
            names, rates, color=['C1' if r['form'] == 'stateless' else 'C0' for r in part]
        )
        for bar, row, rate in zip(bars, part, rates, strict=True):
            bar.set_hatch('//' if row['seconds'] is None else '')
            ax.text(rate, bar.get_y() + bar.get_height() / 2, f' {rate:.3g}', va='center')
        if rates[-1] > LOG_RANGE * rates[0]:  # bars on a logarithmic axis have no common start
            ax.set_xscale('log')
        ax.margins(x=0.3)
        ax.set_xlabel('images per second')
        ax.set_title(f'{data}, batch {batch}', fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_parser(__doc__, {'any device': DEFAULTS})
    parser.add_argument('--data', choices=list(CONFIGS), help='dataset of the models')
    parser.add_argument('--mixers', nargs='+', choices=list(CONFIGS['mnist']), help='token mixers')
    parser.add_argument('--forms', nargs='+', choices=FORMS, help='forms of each model')
    parser.add_argument('--batch', type=positive_int, help='images per batch')
    parser.add_argument(
        '--images', type=positive_int, default=3, help='rounds of whole images; default %(default)s'
    )
    parser.add_argument(
        '--patience',
        type=float,
        default=20.0,
        help='maximum seconds for a batch of whole images; default %(default)s',
    )
    add_clock(parser)
    parser.add_argument('--png', type=Path, help='write a picture to this file')
    parser.add_argument(
        '--replot',
        nargs='+',
        metavar='FILE',
        help='plot outputs of --json, or FILE.jsonl:PATTERN, instead of measuring',
    )
    args = parser.parse_args(arguments)
    fill_in(parser, args, dict.fromkeys(('cpu', 'cuda'), DEFAULTS))
    if 'compiled' in args.forms and args.device != 'cpu':
        parser.error('argument --forms: compiled needs --device cpu, since a GPU replays a graph')
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    set_up_torch(args)
    if args.replot:
        runs = [
            run
            for file in args.replot
            for run in (
                selected(file).values()
                if is_selection(file)
                else [json.loads(Path(file).read_text())]
            )
        ]
        rows = [row for run in runs for row in run['rows']]
        title = runs[0]['environment']['device_name']
    else:
        rows = measure(args)
        write_json(args.json, rows, args)
        title = environment(args)['device_name']
    print('\n'.join(summary(rows)))
    if args.png:
        plot(rows, args.png, title)


if __name__ == '__main__':
    main()
