"""Compute upper bounds of the speed of AFT on a GPU from the configs (roofline model).

The time of a kernel is the maximum of bytes / bandwidth, operations / arithmetic rate, and the
launch time. The time of a model is the sum over its kernels (model_costs.py), that of an op follows
from its formula (op_costs.py). Without arguments, the tables of docs/benchmarks.md between
``<!-- bounds: NAME -->`` and ``<!-- end of bounds -->`` are updated.

    python tools/benchmarks/bounds.py                                   # after an edit of a config
    python tools/benchmarks/bounds.py --check                           # changes nothing
    python tools/benchmarks/bounds.py --gpu a100 --precision tf32       # prints, changes nothing
"""

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from aft_mm.cli.arguments import tool_parser


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a data sheet: bytes and dense operations per second.

    `launch` is the duration of the shortest kernel in seconds, an assumption.
    """

    name: str
    memory: float
    bfloat16: float
    tf32: float
    float32: float
    source: str
    launch: float = 2.5e-6


GPUS = {
    'a100': Gpu('A100 SXM 80 GB', 2.039e12, 312e12, 156e12, 19.5e12, 'NVIDIA A100 data sheet'),
    'h100': Gpu('H100 SXM', 3.35e12, 989e12, 494e12, 67e12, 'NVIDIA H100 data sheet'),
    'h200': Gpu('H200 SXM', 4.8e12, 989e12, 494e12, 67e12, 'NVIDIA H200 data sheet'),
    'l40s': Gpu('L40S', 0.864e12, 362e12, 183e12, 91.6e12, 'NVIDIA L40S data sheet'),
    'rtx4090': Gpu(
        'GeForce RTX 4090', 1.008e12, 165e12, 82.6e12, 82.6e12, 'NVIDIA Ada architecture paper'
    ),
}
ELEMENT_TYPES = dict(bfloat16='bfloat16', tf32='float32', float32='float32')


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = tool_parser(__doc__)
    parser.add_argument('--check', action='store_true', help='fail if the page is out of date')
    parser.add_argument('--gpu', choices=list(GPUS), help='print the tables for this GPU instead')
    parser.add_argument(
        '--precision',
        choices=list(ELEMENT_TYPES),
        help='print the tables for this precision instead',
    )
    parser.add_argument('--json', type=Path, help='write all counts to this file')
    return parser.parse_args(arguments)


if __name__ == '__main__':
    parse_args()  # before the slow imports

import torch
from model_costs import Kernel, decoder_kernels, image_kernels
from op_cases import CASES, BenchmarkCase
from op_costs import compulsory_bytes, operations

from aft_mm.errors import UserError, user_errors

DOCS = Path(__file__).parents[2] / 'docs' / 'benchmarks.md'
REGION = re.compile(r'(<!-- bounds: (.+?) -->\n)((?:(?!<!--).)*)(<!-- end of bounds -->)', re.S)


# Assumed fractions of the peak rates that good kernels reach. For flash attention it is the 35 % on
# an H100 of arXiv 2407.08608; the others are typical of cuBLAS and a copy.
ATTAINED = dict(memory=0.9, product=0.45, attention=0.35)

# Aims: a fraction of the bound with the mixing in one pass, and of a copy.
AIM = 0.95
COPY_AIMS = {('aft_simple', False): 0.65, ('aft_simple', True): 0.55}
BATCH, SEQUENCES = 128, 16
SIZES = (224, 384, 512, 1024)
IMAGES = {
    'small h384 k11': ('aft-conv-small-h384-k11_8xb128-300e_in1k', 'deit-small_8xb128-300e_in1k'),
    'tiny h32 k11': ('aft-conv-tiny-h32-k11_8xb128-300e_in1k', 'deit-tiny_8xb128-300e_in1k'),
}
DECODERS = {
    'AFT-local-256, L 24, d 256': (
        'image_ar/aft-local-256-l24-d256_8xb16-200e_cifar10',
        'image_ar/transformer-l24-d256-h2_8xb4-200e_cifar10',
        (3072, 16384),
    ),
    'AFT-local-32, L 12, d 512': (
        'language_modeling/aft-local-32-l12-d512_8xb16-100e_enwik8-t1024',
        'language_modeling/transformer-l12-d512-h8_8xb16-100e_enwik8-t1024',
        (1024, 4096),
    ),
}
# Ops whose pairs are matrix products; the others are running sums.
PRODUCTS = ('aft_full', 'aft_local', 'aft_local_learned', 'aft_conv')


def kernel_seconds(kernel: Kernel, gpu: Gpu, precision: str) -> float:
    arithmetic = ATTAINED.get(kernel.kind, 1.0) * getattr(gpu, precision)
    in_memory = kernel.bytes / (ATTAINED['memory'] * gpu.memory)
    return max((kernel.computed or kernel.operations) / arithmetic, in_memory, gpu.launch)


def compare(aft: Sequence[Kernel], rival: Sequence[Kernel], gpu: Gpu, precision: str) -> dict:
    """Compute bounds of time(rival) / time(AFT), and the speed of the mixing for the aim.

    Returns:
        by_operations: Ratio of operations, without mixing.
        free: Ratio of times, without mixing.
        one_pass: Ratio with mixing in one kernel per layer that moves its bytes once.
        mixing_of_copy: Fraction of the copy bandwidth that the mixing needs to reach the aim.
    """

    def total(kernels: Sequence[Kernel]) -> float:
        return sum(kernel_seconds(kernel, gpu, precision) for kernel in kernels)

    rest = [kernel for kernel in aft if kernel.kind != 'mixing']
    mixing = total([kernel for kernel in aft if kernel.kind == 'mixing'])
    rest_time, rival_time = total(rest), total(rival)
    one_pass = rival_time / (rest_time + mixing)
    aim = max(1.0, AIM * one_pass)
    budget = rival_time / aim - rest_time
    counts = {
        f'{what}_{who}': sum(getattr(kernel, what) for kernel in kernels)
        for who, kernels in (('aft', aft), ('rival', rival))
        for what in ('operations', 'bytes')
    }
    return dict(
        by_operations=counts['operations_rival'] / counts['operations_aft'],
        free=rival_time / rest_time,
        one_pass=one_pass,
        aim=aim,
        mixing_of_copy=mixing / budget if budget > 0 else math.inf,
        launches_aft=len(aft),
        launches_rival=len(rival),
        milliseconds_aft=1e3 * (rest_time + mixing),
        milliseconds_rival=1e3 * rival_time,
        **counts,
    )


def image_rows(gpu: Gpu, precision: str) -> list[dict]:
    rows, dtype = [], getattr(torch, ELEMENT_TYPES[precision])
    for label, names in IMAGES.items():
        for size in SIZES:
            traced = [
                image_kernels(f'image_classification/{name}', size, BATCH, dtype) for name in names
            ]
            rows.append(dict(model=label, size=size, **compare(*traced, gpu, precision)))
    return rows


def decoder_rows(gpu: Gpu, precision: str) -> list[dict]:
    rows, dtype = [], getattr(torch, ELEMENT_TYPES[precision])
    for label, (*names, lengths) in DECODERS.items():
        for tokens in lengths:
            traced = [decoder_kernels(name, tokens, SEQUENCES, dtype) for name in names]
            rows.append(dict(model=label, size=tokens, **compare(*traced, gpu, precision)))
    return rows


def op_row(name: str, case: BenchmarkCase, training: bool, gpu: Gpu, precision: str) -> dict:
    """Compute the minimum time of an op, its cause, and the maximum fraction of a copy's bandwidth.

    An op with several kernels, or that moves data twice, reaches less.
    """
    dtypes = case.dtypes(getattr(torch, ELEMENT_TYPES[precision]))
    tensors = [
        torch.empty(shape, dtype=dtype, device='meta')
        for shape, dtype in zip(case.input_shapes, dtypes, strict=True)
    ]
    moved = compulsory_bytes(tensors, tensors[2], training)
    count = operations(case.op, case.input_shapes, case.options, training)
    limits = {'bytes': moved / (ATTAINED['memory'] * gpu.memory), 'launch': gpu.launch}
    if case.op in PRODUCTS:
        limits['products'] = count / (ATTAINED['product'] * getattr(gpu, precision))
    least = max(limits.values())
    return dict(
        case=name,
        training=training,
        bytes=moved,
        operations=count,
        microseconds=1e6 * least,
        bound_by=max(limits, key=limits.get),
        of_copy=limits['bytes'] / least,
        aim=COPY_AIMS.get((case.op, training)),
    )


def op_rows(gpu: Gpu, precision: str) -> list[dict]:
    return [
        op_row(name, case, training, gpu, precision)
        for name, case in CASES.items()
        if not name.startswith('small-') and case.baseline is None and case.kept is None
        for training in (False, True)
    ]


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ['---'] * len(header), *lines]
    return ''.join(f'| {" | ".join(row)} |\n' for row in rows)


def percent(share: float) -> str:
    return f'{100 * share:.0f} %'


def model_table(what: str, size: str, per: int, rows: Sequence[dict]) -> str:
    header = (
        what,
        size,
        'GFLOP, AFT / rival',
        'MB',
        'launches',
        'by operations alone',
        'free mixing',
        'mixing in one pass',
        f'aim ({AIM} of one pass, at least 1.0)',
        'copy bandwidth needed',
    )
    lines = [
        (
            row['model'],
            str(row['size']),
            f'{row["operations_aft"] / per / 1e9:.1f} / {row["operations_rival"] / per / 1e9:.1f}',
            f'{row["bytes_aft"] / per / 1e6:.0f} / {row["bytes_rival"] / per / 1e6:.0f}',
            f'{row["launches_aft"]} / {row["launches_rival"]}',
            *(f'{row[bound]:.2f}' for bound in ('by_operations', 'free', 'one_pass', 'aim')),
            percent(row['mixing_of_copy']),
        )
        for row in rows
    ]
    return markdown(header, lines)


def op_table(rows: Sequence[dict]) -> str:
    def both(pair: Sequence[dict], form: Callable[[dict], str]) -> str:
        return ' / '.join(map(form, pair))

    header = (
        'forward / with backward',
        'MB',
        'GFLOP',
        'least µs',
        'set by',
        'of a copy, at most',
        'aim',
    )
    lines = [
        (
            pair[0]['case'],
            both(pair, lambda row: f'{row["bytes"] / 1e6:.0f}'),
            both(pair, lambda row: f'{row["operations"] / 1e9:.1f}'),
            both(pair, lambda row: f'{row["microseconds"]:.1f}'),
            both(pair, lambda row: row['bound_by']),
            both(pair, lambda row: percent(row['of_copy'])),
            both(pair, lambda row: percent(row['aim'])) if pair[0]['aim'] else '–',
        )
        for pair in zip(rows[::2], rows[1::2], strict=True)
    ]
    return markdown(header, lines)


def count_all(gpu: Gpu, precision: str) -> dict[str, list[dict]]:
    return dict(
        images=image_rows(gpu, precision),
        decoders=decoder_rows(gpu, precision),
        ops=op_rows(gpu, precision),
    )


def tables(rows: dict[str, list[dict]]) -> dict[str, str]:
    return dict(
        images=model_table('AFT-conv over DeiT, inference', 'px', BATCH, rows['images']),
        decoders=model_table(
            'over softmax attention, training step', 'T', SEQUENCES, rows['decoders']
        ),
        ops=op_table(rows['ops']),
    )


def updated(text: str, made: dict[str, str]) -> str:
    found = [name for _, name, _, _ in REGION.findall(text)]
    if sorted(found) != sorted(made):
        raise UserError(
            f'{DOCS.name} must hold the tables {", ".join(sorted(made))} of bounds, each once, '
            f'got {", ".join(sorted(found)) or "none"}'
        )
    return REGION.sub(lambda region: region[1] + made[region[2]] + region[4], text)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    gpu, precision = args.gpu or 'h200', args.precision or 'bfloat16'
    rows = count_all(GPUS[gpu], precision)
    made = tables(rows)
    if args.json:
        about = dict(gpu=asdict(GPUS[gpu]), precision=precision, attained=ATTAINED)
        args.json.write_text(json.dumps(dict(assumed=about, rows=rows), indent=2) + '\n')
    if args.gpu or args.precision:
        print('\n'.join(made.values()))
        return
    before = DOCS.read_text(encoding='utf-8')
    after = updated(before, made)
    if args.check and after != before:
        raise UserError(
            'the bounds in docs/benchmarks.md differ from the configs; run '
            'python tools/benchmarks/bounds.py'
        )
    if after != before:
        DOCS.write_text(after, encoding='utf-8')
        print(f'updated the tables of {DOCS.name}')


if __name__ == '__main__':
    with user_errors(OSError):
        main()
