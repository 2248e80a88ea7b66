"""Images per second and peak memory of AFT-conv backbones against DeiT, as ratios.

Per round every model sees the same batch once, in turn, so that a slow moment of the machine falls
on all of them; a ratio is the median over rounds of time(DeiT) / time(model). Three kinds of models
of the same size, without the classification head:

- DeiT: timm's, with torch's scaled_dot_product_attention inside (1.00 by definition);
- AFT-conv;
- bound: the same AFT-conv with the mixing left out (projections only), the most that any
  implementation of the op could reach.

    python tools/benchmarks/vit_throughput.py --size 224 384 --dtype float32 --json out.json

A case whose op disagrees with the float64 oracle is not timed: the run stops with the error seen.
"""

import argparse
import os
import statistics
from functools import partial
from pathlib import Path

import timm
import torch
from memory import added_peak, in_fresh_process
from timing import interleaved, ratio, write_json
from torch import nn

import aft_mm.models  # noqa: F401 - registers what is built below
from aft_mm.layers.mixers import AFTConv
from aft_mm.ops import aft_conv, reference
from aft_mm.registry import MODELS

TOLERANCE = {'float32': 1e-4, 'bfloat16': 2e-2}


@MODELS.register_module()
class ProjectionsOnly(AFTConv):
    """AFT-conv without the op: every projection runs, the value passes through."""

    def _mix(self, query, key, value, grid, key_mask):
        return value


def build(name: str, arch: str, size: int) -> nn.Module:
    """'deit', 'aft-h{heads}-k{kernel}' or 'bound-h{heads}-k{kernel}' for images of `size` px."""
    if name == 'deit':
        return timm.create_model(
            f'deit_{arch}_patch16_224', img_size=size, num_classes=0, dynamic_img_size=False
        )
    kind, heads, kernel = name.split('-')
    mixer = 'AFTConv' if kind == 'aft' else 'ProjectionsOnly'
    return MODELS.build(
        dict(
            type='aft_mm.AFTViT',
            arch=arch,
            img_size=size,
            position_embedding=False,
            token_mixer=dict(
                type=f'aft_mm.{mixer}', num_heads=int(heads[1:]), kernel_size=int(kernel[1:])
            ),
        )
    )


def check_op(name: str, arch: str, size: int, dtype: torch.dtype) -> None:
    """Hold the op on this grid against the float64 oracle, on one image and two heads."""
    if not name.startswith('aft'):
        return
    _, heads, kernel = name.split('-')
    dims = {'tiny': 192, 'small': 384, 'base': 768}[arch] // int(heads[1:]) * 2
    grid = (size // 16, size // 16)
    tokens = grid[0] * grid[1]
    query, value = (torch.randn(1, tokens, dims, dtype=dtype) for _ in range(2))
    key, weight = torch.randn(1, tokens, 2, dtype=dtype), torch.randn(2, *[int(kernel[1:])] * 2)
    options = dict(grid=grid, global_connectivity=True, causal=False, key_mask=None, gate='sigmoid')
    expected = reference.aft_conv(query, key, value.double(), weight, **options)
    error = (aft_conv(query, key, value, weight, **options).double() - expected).abs().max().item()
    allowed = TOLERANCE[str(dtype).removeprefix('torch.')]
    if not error <= allowed:
        raise SystemExit(
            f'{name} at {size} px {dtype} is wrong by {error:.2e} > {allowed}: not timed'
        )


def peak_memory(name: str, arch: str, size: int, dtype: str, batch: int) -> float:
    """MiB that one inference adds to a process that holds model and images."""
    model = build(name, arch, size).eval().to(getattr(torch, dtype))
    images = torch.randn(batch, 3, size, size, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        model(images[:1])
        return added_peak(partial(model, images))


def profile(model: nn.Module, images: torch.Tensor, top: int = 14) -> list[dict]:
    """The operations that take most of one batch: name, input shapes, calls, own milliseconds."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as recorded:
        model(images)
    events = recorded.key_averages(group_by_input_shape=True)
    events = sorted(events, key=lambda event: -event.self_cpu_time_total)[:top]
    return [
        dict(
            op=event.key,
            shapes=str([shape for shape in event.input_shapes if shape]),
            calls=event.count,
            milliseconds=round(event.self_cpu_time_total / 1e3, 2),
        )
        for event in events
    ]


def run_case(args: argparse.Namespace, size: int, dtype: str) -> list[dict]:
    """Measure all models at one size and type; one row per model."""
    models = {}
    for name in args.models:
        torch.manual_seed(0)
        check_op(name, args.arch, size, getattr(torch, dtype))
        models[name] = build(name, args.arch, size).eval().to(getattr(torch, dtype))
    images = torch.randn(args.batch, 3, size, size, dtype=getattr(torch, dtype))
    with torch.inference_mode():
        calls = {name: partial(model, images) for name, model in models.items()}
        times = interleaved(calls, args.rounds)
        profiles = {name: profile(models[name], images) for name in models if 'aft' in name}
    rows = []
    for name, seconds in times.items():
        row = dict(model=name, size=size, dtype=dtype)
        row['images_per_second'] = args.batch / statistics.median(seconds)
        for other in ('deit', name.replace('aft', 'bound')):
            if other in times and other != name:
                label = 'deit' if other == 'deit' else 'bound'
                row[f'speed_vs_{label}'] = ratio(times, other, name)
        row['peak_mib'] = in_fresh_process(peak_memory, name, args.arch, size, dtype, args.batch)
        if name in profiles:
            row['profile'] = profiles[name]
        rows.append(row)
        print(
            f'{size:>4} px {dtype:<9} {name:<12} {row["images_per_second"]:8.1f} images/s   '
            f'x DeiT {row.get("speed_vs_deit", 1):5.2f}   '
            f'x bound {row.get("speed_vs_bound", 1):5.2f}   peak {row["peak_mib"]:7.1f} MiB'
        )
    return rows


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--arch', default='tiny', choices=['tiny', 'small', 'base'])
    parser.add_argument('--size', type=int, nargs='+', default=[224], help='image sides in px')
    parser.add_argument('--dtype', nargs='+', default=['float32'], choices=list(TOLERANCE))
    parser.add_argument(
        '--models',
        nargs='+',
        default=['deit', 'aft-h32-k11', 'bound-h32-k11', 'aft-h192-k11'],
        help='deit, aft-h{heads}-k{kernel}, bound-h{heads}-k{kernel}',
    )
    parser.add_argument('--batch', type=int, default=16)
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--threads', type=int, default=os.cpu_count())
    parser.add_argument('--json', type=Path, help='write rows and the environment here')
    return parser.parse_args()


def main() -> None:
    """Run every combination of size and type."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    rows = [
        row for size in args.size for dtype in args.dtype for row in run_case(args, size, dtype)
    ]
    settings = {name: getattr(args, name) for name in ('threads', 'batch', 'rounds', 'arch')}
    write_json(args.json, rows, timm=timm.__version__, **settings)


if __name__ == '__main__':
    main()
