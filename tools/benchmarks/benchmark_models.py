"""Images per second and peak memory of AFT-conv backbones against DeiT, as ratios.

Per round every model sees the same batch once, in turn, so that a slow moment of the machine falls
on all of them; a ratio is the median over rounds of time(DeiT) / time(model), of the DeiT of the
same size. Three kinds of models, without the classification head:

- DeiT: timm's, with torch's scaled_dot_product_attention inside (1.00 by definition);
- AFT-conv;
- bound: the same AFT-conv with the mixing left out (projections only), the most that any
  implementation of the op could reach.

    python tools/benchmarks/benchmark_models.py --size 224 384 --dtype float32 --json out.json

A case whose op disagrees with the float64 oracle is not timed: the run stops with the error seen.
"""

import argparse
import re
import statistics
from functools import partial

import torch
from arguments import common_parser, fill_in, named_in_errors, positive_int, set_up_torch
from memory import added_peak, in_fresh_process
from op_cases import Case
from parity import TOLERANCE, Oracle
from record import write_json
from rivals import missing
from timing import interleaved, ratio
from torch import nn

import aft_mm.models  # noqa: F401 - registers what is built below
from aft_mm.layers.mixers import AFTConv
from aft_mm.registry import MODELS

DTYPES = {str(dtype).removeprefix('torch.'): dtype for dtype in TOLERANCE}
PATCH = 16
CHANNELS = dict(tiny=192, small=384, base=768)
DEFAULTS = {
    'cpu': dict(
        size=[224],
        dtype=['float32'],
        models=['deit-tiny', 'aft-tiny-h32-k11', 'bound-tiny-h32-k11', 'aft-tiny-h192-k11'],
        batch=16,
        rounds=15,
    ),
    # Table 7 of arXiv 2105.14103.
    'cuda': dict(
        size=[224, 384, 512],
        dtype=['bfloat16'],
        models=[
            *('deit-tiny', 'aft-tiny-h32-k11', 'aft-tiny-h192-k11', 'bound-tiny-h32-k11'),
            *('deit-small', 'aft-small-h16-k11', 'aft-small-h384-k11', 'aft-small-h384-k15'),
            'bound-small-h384-k11',
        ],
        batch=128,
        rounds=20,
    ),
}


@MODELS.register_module()
class ProjectionsOnly(AFTConv):
    """AFT-conv without the op: every projection runs, the value passes through."""

    def _mix(self, query, key, value, grid, key_mask):
        return value


def parse_name(text: str) -> tuple[str, str, int, int]:
    """Kind, size, heads and kernel of 'deit-tiny', 'aft-small-h384-k11' or 'bound-tiny-h32-k11'."""
    archs = '|'.join(CHANNELS)
    if found := re.fullmatch(f'deit-({archs})', text):
        return 'deit', found[1], 0, 0
    if found := re.fullmatch(rf'(aft|bound)-({archs})-h(\d+)-k(\d+)', text):
        return found[1], found[2], int(found[3]), int(found[4])
    raise argparse.ArgumentTypeError(
        'a model must be deit-ARCH, aft-ARCH-hHEADS-kKERNEL or bound-ARCH-hHEADS-kKERNEL with '
        f'ARCH among {", ".join(CHANNELS)}, got {text!r}'
    )


def known_name(text: str) -> str:
    """The name of a model, if it is one."""
    parse_name(text)
    return text


def image_side(text: str) -> int:
    """The side of an image that consists of whole patches."""
    if positive_int(text) % PATCH:
        raise argparse.ArgumentTypeError(f'must be a multiple of {PATCH}, got {text!r}')
    return int(text)


def build(name: str, size: int, dtype: str, device: str = 'cpu') -> nn.Module:
    """The model of this name for images of `size` px, the same weights each time."""
    kind, arch, heads, kernel = parse_name(name)
    torch.manual_seed(0)
    if kind == 'deit':
        import timm

        options = dict(img_size=size, num_classes=0, dynamic_img_size=False)
        model = timm.create_model(f'deit_{arch}_patch16_224', **options)
    else:
        mixer = 'AFTConv' if kind == 'aft' else 'ProjectionsOnly'
        model = MODELS.build(
            dict(
                type='aft_mm.AFTViT',
                arch=arch,
                img_size=size,
                patch_size=PATCH,
                position_embedding=False,
                token_mixer=dict(type=f'aft_mm.{mixer}', num_heads=heads, kernel_size=kernel),
            )
        )
    return model.eval().to(device, DTYPES[dtype])


def check_op(name: str, size: int, dtype: str, device: str) -> None:
    """Hold the op on this grid against the float64 oracle, forward."""
    kind, arch, heads, kernel = parse_name(name)
    if kind != 'aft':
        return
    side = size // PATCH
    options, weight = dict(grid=(side, side)), ((heads, kernel, kernel),)
    case = Case('aft_conv', 2, side * side, CHANNELS[arch], options, weight, heads)
    tensors = case.inputs(DTYPES[dtype], device)
    error = Oracle.of(case, tensors).errors(case, tensors, training=False)['output']
    allowed = TOLERANCE[DTYPES[dtype]]
    if not error <= allowed:
        raise SystemExit(
            f'{name} at {size} px {dtype} is wrong by {error:.2e} > {allowed}: not timed'
        )


def random_images(batch: int, size: int, dtype: str, device: str = 'cpu') -> torch.Tensor:
    """A batch of images."""
    return torch.randn(batch, 3, size, size, device=device).to(DTYPES[dtype])


@torch.inference_mode()
def cpu_peak(name: str, size: int, dtype: str, batch: int, threads: int) -> float:
    """MiB that one inference adds to a process that holds model and images."""
    torch.set_num_threads(threads)
    model, images = build(name, size, dtype), random_images(batch, size, dtype)
    model(images[:1])
    return added_peak(partial(model, images))


def profile(model: nn.Module, images: torch.Tensor, top: int = 14) -> list[dict]:
    """The operations that take most of one batch: name, input shapes, calls, own milliseconds."""
    device = images.device.type
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == 'cuda':
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def own_time(event) -> float:
        return event.self_device_time_total if device == 'cuda' else event.self_cpu_time_total

    with torch.profiler.profile(activities=activities, record_shapes=True) as recorded:
        model(images)
    events = recorded.key_averages(group_by_input_shape=True)
    return [
        dict(
            op=event.key,
            shapes=str([shape for shape in event.input_shapes if shape]),
            calls=event.count,
            milliseconds=round(own_time(event) / 1e3, 2),
        )
        for event in sorted(events, key=own_time, reverse=True)[:top]
    ]


@torch.inference_mode()
def run_case(args: argparse.Namespace, size: int, dtype: str) -> list[dict]:
    """Measure all models at one size and type; one row per model."""
    models, rows = {}, []
    for name in args.models:
        if name.startswith('deit') and (reason := missing('timm')):
            rows.append(dict(model=name, size=size, dtype=dtype, reason=reason))
            continue
        with torch.inference_mode(False):
            check_op(name, size, dtype, args.device)
        models[name] = build(name, size, dtype, args.device)
    images = random_images(args.batch, size, dtype, args.device)
    calls = {name: partial(model, images) for name, model in models.items()}
    times = interleaved(calls, args.rounds, args.device)
    for name, seconds in times.items():
        row = dict(model=name, size=size, dtype=dtype)
        row['images_per_second'] = args.batch / statistics.median(seconds)
        deit, bound = f'deit-{name.split("-")[1]}', name.replace('aft', 'bound')
        for label, other in (('deit', deit), ('bound', bound)):
            if other in times and other != name:
                row[f'speed_vs_{label}'] = ratio(times, other, name)
        if torch.device(args.device).type == 'cuda':
            row['peak_mib'] = added_peak(calls[name], args.device)
        else:
            row['peak_mib'] = in_fresh_process(
                cpu_peak, name, size, dtype, args.batch, args.threads
            )
        if name.startswith('aft'):
            row['profile'] = profile(models[name], images)
        rows.append(row)
    return rows


def line(row: dict) -> str:
    """A row as a line of text."""
    start = f'{row["size"]:>4} px {row["dtype"]:<9} {row["model"]:<22}'
    if 'reason' in row:
        return f'{start}not run: {row["reason"]}'
    text = f'{start}{row["images_per_second"]:9.1f} images/s   peak {row["peak_mib"]:8.1f} MiB'
    for label, title in (('deit', 'DeiT'), ('bound', 'bound')):
        if f'speed_vs_{label}' in row:
            text += f'   {row[f"speed_vs_{label}"]:.2f} x {title}'
    return text


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; what is left out depends on the device."""
    parser = common_parser(__doc__, DEFAULTS)
    parser.add_argument('--size', type=image_side, nargs='+', help='image sides in px')
    parser.add_argument('--dtype', nargs='+', choices=list(DTYPES))
    parser.add_argument(
        '--models',
        nargs='+',
        type=known_name,
        metavar='MODEL',
        help='deit-ARCH, aft-ARCH-hHEADS-kKERNEL, bound-ARCH-hHEADS-kKERNEL; ARCH: '
        + ', '.join(CHANNELS),
    )
    parser.add_argument('--batch', type=positive_int, help='images')
    args = parser.parse_args(arguments)
    fill_in(args, DEFAULTS)
    for name in args.models:
        # Without timm its models are reported as not run.
        if not name.startswith('deit'):
            with named_in_errors(parser, f'--models {name}'), torch.device('meta'):
                build(name, args.size[0], args.dtype[0], 'meta')
    return args


def main(arguments: list[str] | None = None) -> None:
    """Run every combination of size and type."""
    args = parse_args(arguments)
    set_up_torch(args)
    rows = []
    for size in args.size:
        for dtype in args.dtype:
            found = run_case(args, size, dtype)
            print('\n'.join(map(line, found)), flush=True)
            rows += found
    write_json(args.json, rows, args)


if __name__ == '__main__':
    main()
