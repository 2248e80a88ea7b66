"""Measure backbones as people deploy them on a CPU: by runtime and data type.

The features of each converted model are compared with those of torch in float32. A ratio is the
median over rounds of ``time(best form of DeiT) / time(best form of the model)``, by data type and
over all of them.

Load time and peak memory are those of a fresh process that runs the converted file once.
efficientnet_lite0 has trained weights, and its rows their accuracy on Imagenette.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
import trained_rival
from arguments import add_clock, common_parser, image_side, known_name, positive_int
from benchmark_models import build, check_op, features, random_images
from measuring import Times, in_fresh_process, interleaved, proc_status, ratio
from parity import relative_error
from record import fill_in, set_up_torch, write_json
from torch import Tensor, nn

from aft_mm.errors import UserError
from aft_mm.export.files import FORMATS, GraphFile, OnnxFile, OpenVINOFile, TorchFile
from aft_mm.export.graphs import Graph, trace

DTYPES = ('float32', 'bfloat16', 'int8')
# loops: AFT-conv is an operator in C++
RUNTIMES = (
    'eager',
    'compiled',
    'aoti',
    'onnxruntime',
    'onnxruntime-loops',
    'openvino',
    'openvino-loops',
)
DEFAULTS = {
    'cpu': dict(
        models=[
            'deit-tiny',
            'aft-tiny-h32-k11',
            'convnext_femto',
            'efficientvit_b1',
            'edgenext_small',
        ],
        size=[224],
        batch=[1, 16],
        dtype=list(DTYPES),
        runtimes=list(RUNTIMES),
        rounds=15,
    )
}


# Relative error of the features. int8 rounds weights and inputs; its error is in the row.
TOLERANCE = dict(float32=1e-3, bfloat16=5e-2, int8=0.5)
# The error in bfloat16 is larger; OpenVINO uses float32 where a processor lacks bfloat16.
LEAST_ERROR = 1e-4
REFUSED = {
    ('eager', 'int8'): 'torch alone has no int8 form',
    ('compiled', 'int8'): 'torch alone has no int8 form',
    ('aoti', 'int8'): 'torch alone has no int8 form',
    ('onnxruntime', 'bfloat16'): 'ONNX Runtime has no bfloat16 on a CPU',
    ('onnxruntime-loops', 'bfloat16'): 'ONNX Runtime has no bfloat16 on a CPU',
}
Cell = tuple[str, str, str]
Call = Callable[[Tensor], Tensor]


class Features(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor]:
        return (features(self.model(image)),)


def reason_against(runtime: str, dtype: str) -> str | None:
    try:
        format_of(runtime).check_packages(int8=dtype == 'int8')
    except UserError as error:
        return str(error)
    return REFUSED.get((runtime, dtype))


def format_of(runtime: str) -> type[GraphFile]:
    program = runtime.removesuffix('-loops')
    return next((kind for kind in FORMATS.values() if kind.runtime == program), TorchFile)


def error_reason(dtype: str, error: float) -> str | None:
    if not error <= TOLERANCE[dtype]:
        return f'wrong by {error:.1e}, more than {TOLERANCE[dtype]}'
    if dtype == 'bfloat16' and error < LEAST_ERROR:
        return f'ran in float32, as the error is {error:.1e}'
    if dtype == 'int8' and error < LEAST_ERROR:
        return f'has no int8 product, as the error is {error:.1e}'
    return None


def convert(name: str, runtime: str, dtype: str, images: Tensor, folder: Path) -> Path | None:
    if runtime in ('eager', 'compiled'):
        return None
    torch_dtype = dtype if runtime == 'aoti' else 'float32'
    model = Features(build(name, images.shape[-1], torch_dtype))
    inputs = dict(image=images.to(getattr(torch, torch_dtype)))
    graph = Graph('', model, inputs, ['features'])
    kind, loops = format_of(runtime), runtime.endswith('-loops')
    program, _ = trace(graph, kind.runtime, loops)
    path = (folder / f'{name}-{runtime}-{dtype}').with_suffix(kind.suffix)
    if runtime == 'aoti':
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs={'freezing': True}
            )
        return path
    file = kind(path)
    file.write(program, graph, loops)
    if dtype == 'bfloat16' and runtime == 'openvino-loops':
        file.round_inputs_of_loops()
    if dtype == 'int8':
        batch, _, size, _ = images.shape
        trained = name == trained_rival.NAME
        file.quantize(trained_rival.examples(batch, size) if trained else [images])
    return path


def load(name: str, runtime: str, dtype: str, path: Path | None, size: int, threads: int) -> Call:
    if path is None:
        cast = getattr(torch, dtype)
        model = build(name, size, dtype)
        if runtime == 'compiled':
            model = torch.compile(model, dynamic=False, options=dict(freezing=True))
        return torch.inference_mode()(lambda images: features(model(images.to(cast))))
    if runtime == 'aoti':
        cast = getattr(torch, dtype)
        package = torch._inductor.aoti_load_package(str(path))
        return lambda images: package(images.to(cast))[0]
    if path.suffix == '.onnx':
        opened = OnnxFile(path).session(threads)
        return lambda images: torch.from_numpy(opened.run(None, {'image': images.numpy()})[0])
    precision = 'bf16' if dtype == 'bfloat16' else 'f32'
    settings = dict(INFERENCE_PRECISION_HINT=precision, INFERENCE_NUM_THREADS=threads)
    settings['ENABLE_CPU_PINNING'] = False  # of this thread, and so of all threads that it starts
    compiled = OpenVINOFile(path).compile(settings)
    return lambda images: torch.from_numpy(compiled(images.numpy())[0])


def loading(cell: Cell, path: Path | None, size: int, batch: int, threads: int) -> dict:
    torch.set_num_threads(threads)
    images = random_images(batch, size, 'float32')
    start = time.perf_counter()
    load(*cell, path, size, threads)(images)
    return dict(load_seconds=time.perf_counter() - start, peak_mib=proc_status('VmHWM'))


def run_case(args: argparse.Namespace, size: int, batch: int, folder: Path) -> list[dict]:
    torch.compiler.reset()
    torch.manual_seed(0)
    images = random_images(batch, size, 'float32')
    rows, calls = [], {}
    for name in args.models:
        if name == trained_rival.NAME and (reason := trained_rival.reason_against()):
            rows.append(
                dict(model=name, size=size, batch=batch, runtime='', dtype='', reason=reason)
            )
            continue
        check_op(name, size, 'float32', 'cpu')
        expected = load(name, 'eager', 'float32', None, size, args.threads)(images)
        for runtime, dtype in product(args.runtimes, args.dtype):
            cell = name, runtime, dtype
            row = dict(model=name, runtime=runtime, dtype=dtype, size=size, batch=batch)
            rows.append(row)
            if reason := reason_against(runtime, dtype):
                row['reason'] = reason
                continue
            try:
                path = convert(*cell, images, folder)
                # First, as a runtime may crash.
                costs = in_fresh_process(loading, cell, path, size, batch, args.threads)
                call = load(*cell, path, size, args.threads)
                row['error'] = relative_error(call(images).float(), expected)
                if name == trained_rival.NAME:
                    row |= trained_rival.accuracy(call, batch, size)
            except Exception as error:  # of a runtime that lacks an op, or has crashed
                row['reason'] = f'{type(error).__name__}: {str(error).splitlines()[0]}'
                continue
            if reason := error_reason(dtype, row['error']):
                row['reason'] = reason
                continue
            row |= costs
            calls[cell] = partial(call, images)
    times = interleaved(calls, args.rounds, clock=args.clock)
    for row in rows:
        cell = row['model'], row['runtime'], row['dtype']
        if cell in calls:
            seconds = sorted(times[cell])
            row['images_per_second'] = batch / statistics.median(seconds)
            row['milliseconds_p90'] = 1e3 * seconds[int(0.9 * (len(seconds) - 1))]
    return rows + best_forms(args, size, batch, times)


def best_forms(args: argparse.Namespace, size: int, batch: int, times: Times) -> list[dict]:
    sets = [*([dtype] for dtype in args.dtype), args.dtype]
    return [row for dtypes in sets for row in _best(args, size, batch, times, dtypes)]


def _best(args, size: int, batch: int, times: Times, dtypes: list[str]) -> list[dict]:
    best: dict[str, Cell] = {}
    for name in args.models:
        forms = [cell for cell in times if cell[0] == name and cell[2] in dtypes]
        if forms:
            best[name] = min(forms, key=lambda cell: statistics.median(times[cell]))
    first = best.get(args.models[0])
    return [
        dict(
            best_of=name,
            of='/'.join(dtypes),
            runtime=cell[1],
            dtype=cell[2],
            size=size,
            batch=batch,
            images_per_second=batch / statistics.median(times[cell]),
            **({f'speed_vs_{args.models[0]}': ratio(times, first, cell)} if first else {}),
        )
        for name, cell in best.items()
    ]


def line(row: dict) -> str:
    what = f'best of {row["of"]}' if 'best_of' in row else ''
    name = row.get('best_of') or row['model']
    start = (
        f'{row["size"]:>4} px x {row["batch"]:<3} {name:<22} {row["runtime"]:<12}{row["dtype"]:<9}'
    )
    if 'reason' in row:
        return f'{start} not run: {row["reason"]}'
    text = f'{start}{row["images_per_second"]:8.1f} images/s'
    if what:
        ratios = [
            f'{value:.2f} x {key[9:]}' for key, value in row.items() if key.startswith('speed')
        ]
        return f'{text}   {what}   {" ".join(ratios)}'
    return (
        f'{text}   p90 {row["milliseconds_p90"]:7.1f} ms   load {row["load_seconds"]:5.1f} s   '
        f'peak {row["peak_mib"]:6.0f} MiB   error {row["error"]:.0e}'
        + (f'   accuracy {row["accuracy"]:.1f} %' if 'accuracy' in row else '')
    )


def main(arguments: list[str] | None = None) -> None:
    parser = common_parser(__doc__, DEFAULTS)
    parser.add_argument('--models', nargs='+', type=known_name, metavar='MODEL')
    parser.add_argument('--size', nargs='+', type=image_side, help='image sides in px')
    parser.add_argument('--batch', nargs='+', type=positive_int, help='images per batch')
    parser.add_argument('--dtype', nargs='+', choices=DTYPES)
    parser.add_argument('--runtimes', nargs='+', choices=RUNTIMES)
    add_clock(parser)
    args = parser.parse_args(arguments)
    if args.device not in (None, 'cpu'):
        parser.error(f'argument --device: must be cpu, got {args.device!r}')
    args.device = 'cpu'
    fill_in(parser, args, DEFAULTS)
    set_up_torch(args)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for size, batch in product(args.size, args.batch):
            added = run_case(args, size, batch, Path(folder))
            print('\n'.join(map(line, added)), flush=True)
            rows += added
    write_json(args.json, rows, args)


if __name__ == '__main__':
    main()
