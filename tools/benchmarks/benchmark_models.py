"""Measure images per second and peak memory of AFT-conv backbones, DeiT and other networks.

The models are interleaved and have random weights and no head. A ratio is the median over rounds of
time(DeiT) / time(model), with the DeiT of the same size and form (eager or compiled). `bound` is
AFT-conv without the mixing.

With `--train` (eager, float32, on a CPU), forward and backward with recomputed blocks are measured.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import trained_rival
from arguments import (
    CHANNELS,
    DTYPES,
    MODEL_RIVALS,
    PATCH,
    add_clock,
    common_parser,
    image_side,
    known_name,
    named_in_errors,
    parse_name,
    positive_int,
)
from decoders import ProjectionsOnly
from measuring import Times, added_peak, both_clocks, in_fresh_process, ratio
from op_cases import sized
from parity import DECODER_TOLERANCE, Oracle, relative_error, require_small
from record import fill_in, set_up_torch, write_json
from rivals import missing
from torch import Tensor, nn

import aft_mm.models  # noqa: F401 - registers what is built below
from aft_mm.layers.embedding import PatchEmbedding
from aft_mm.layers.position_bias import ConvPositionBias
from aft_mm.ops.cases import TOLERANCE, conv
from aft_mm.registry import MODELS

FORMS = ('eager', 'compiled')
DEFAULTS = {
    'cpu': dict(
        size=[224],
        dtype=['float32'],
        models=['deit-tiny', 'aft-tiny-h32-k11', 'bound-tiny-h32-k11', 'aft-tiny-h192-k11'],
        forms=['eager'],
        batch=16,
        rounds=15,
    ),
    # Table 7 of arXiv 2105.14103, and other networks.
    'cuda': dict(
        size=[224, 384, 512, 1024],
        dtype=['bfloat16'],
        models=[
            *('deit-tiny', 'aft-tiny-h32-k11', 'aft-tiny-h192-k11', 'bound-tiny-h32-k11'),
            *('deit-small', 'aft-small-h16-k11', 'aft-small-h384-k11', 'aft-small-h384-k15'),
            'bound-small-h384-k11',
            *('deit3_small_patch16_224', 'vit_relpos_small_patch16_224'),
            *('convnext_tiny', 'convnext_femto'),
        ],
        forms=list(FORMS),
        batch=128,
        rounds=20,
    ),
}


Cell = tuple[str, str]


class TokensOfPatches(PatchEmbedding):
    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image)[0]


@torch.inference_mode(False)  # parameters of inference mode are cached by no op
def build(name: str, size: int, dtype: str, device: str = 'cpu') -> nn.Module:
    kind, arch, heads, kernel = parse_name(name)
    torch.manual_seed(0)
    if name == trained_rival.NAME:
        model = trained_rival.build()
    elif kind in ('deit', 'rival'):
        import timm

        timm_name = name if kind == 'rival' else f'deit_{arch}_patch16_224'
        options = dict(img_size=size) if timm_name.startswith(('deit', 'vit', 'pit')) else {}
        model = timm.create_model(timm_name, num_classes=0, **options)
        if kind == 'deit':
            model.patch_embed = TokensOfPatches(3, model.embed_dim, PATCH)
    else:
        mixer = 'AFTConv' if kind == 'aft' else ProjectionsOnly.__name__
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
        for module in model.modules():
            if isinstance(module, ConvPositionBias):  # to about ±2, as training does
                nn.init.constant_(module.gamma, 0.5)
    return model.eval().to(device, getattr(torch, dtype))


def check_op(name: str, size: int, dtype: str, device: str) -> None:
    kind, arch, heads, kernel = parse_name(name)
    if kind != 'aft':
        return
    side = size // PATCH
    case = sized(conv((side, side), (kernel, kernel), heads, channels=CHANNELS[arch]), 2)
    tensors = case.tensors(getattr(torch, dtype), device)
    error = Oracle.of(case, tensors).errors(case, tensors, training=False)['output']
    require_small(f'{name} at {size} px {dtype}', error, TOLERANCE[getattr(torch, dtype)])


def random_images(batch: int, size: int, dtype: str, device: str = 'cpu') -> torch.Tensor:
    return torch.randn(batch, 3, size, size, device=device).to(getattr(torch, dtype))


def in_form(model: nn.Module, form: str) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, dynamic=False) if form == 'compiled' else model


def training(model: nn.Module) -> Callable[[Tensor], Tensor]:
    if hasattr(model, 'set_grad_checkpointing'):
        model.set_grad_checkpointing(True)
    else:
        model.with_cp = True
    model.train()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def step(images: Tensor) -> Tensor:
        output = features(model(images.clone()))
        output.square().mean().backward()
        model.zero_grad(set_to_none=True)
        return output.detach()

    return step


@torch.inference_mode()
def cpu_peak(
    name: str, form: str, size: int, dtype: str, batch: int, threads: int, train: bool
) -> float:
    torch.set_num_threads(threads)
    model, images = build(name, size, dtype), random_images(batch, size, dtype)
    call = training(model) if train else in_form(model, form)
    # Compiled code supports one shape, and a backward pass of another size takes as long.
    call(images if form == 'compiled' or train else images[:1])
    return added_peak(partial(call, images))


def profile(call: Callable[[], object], device: str, top: int = 14) -> list[dict]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == 'cuda':
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def own_time(event) -> float:
        return event.self_device_time_total if device == 'cuda' else event.self_cpu_time_total

    with torch.profiler.profile(activities=activities, record_shapes=True) as recorded:
        call()
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


def reason_against(
    call: Callable[[], object], name: str, eager: Callable[[], object] | None
) -> str | None:
    try:
        result = features(call())
        expected = None if eager is None else features(eager())
    except torch.OutOfMemoryError:
        return 'out of memory'
    except Exception as error:
        # Errors of other packages are reported; errors of our models are raised.
        if parse_name(name)[0] != 'rival':
            raise
        return f'timm failed: {str(error).splitlines()[0]}'
    if expected is not None:
        allowed = DECODER_TOLERANCE[str(expected.dtype).removeprefix('torch.')]
        error = relative_error(result, expected)
        if not error <= allowed:
            return f'the compiled model is wrong by {error:.2e} > {allowed}'
    return None


def features(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@torch.inference_mode()
def admit(
    args: argparse.Namespace, size: int, dtype: str, images: Tensor
) -> tuple[list[dict], dict[Cell, Callable[[], object]]]:
    rows, calls = [], {}
    for name in args.models:
        kind = parse_name(name)[0]
        with torch.inference_mode(False):
            check_op(name, size, dtype, args.device)
        model, lacks = None, None
        if kind in ('deit', 'rival'):
            trained = name == trained_rival.NAME
            lacks = trained_rival.reason_against() if trained else missing('timm')
        for form in args.forms:
            row = dict(model=name, form=form, size=size, dtype=dtype)
            rows.append(row)
            if lacks:
                row['reason'] = lacks
                continue
            model = model or build(name, size, dtype, args.device)
            call = partial(training(model) if args.train else in_form(model, form), images)
            ours = form == 'compiled' and kind in ('aft', 'bound')
            reason = reason_against(call, name, partial(model, images) if ours else None)
            if reason is None:
                calls[name, form] = call
            else:
                row['reason'] = reason
    return rows, calls


def measured(cell: Cell, times: Times, walls: Times, batch: int) -> dict:
    (name, form), numbers = cell, {}
    for prefix, seconds in (('', times), ('wall_', walls)) if walls else (('', times),):
        numbers[f'{prefix}images_per_second'] = batch / statistics.median(seconds[cell])
        deit, bound = f'deit-{parse_name(name)[1]}', name.replace('aft', 'bound')
        for label, other in (('deit', deit), ('bound', bound), ('eager', name)):
            other_cell = (other, 'eager' if label == 'eager' else form)
            if other_cell in times and other_cell != cell:
                numbers[f'{prefix}speed_vs_{label}'] = ratio(seconds, other_cell, cell)
    return numbers


@torch.inference_mode()
def run_case(args: argparse.Namespace, size: int, dtype: str) -> list[dict]:
    # Models of other sizes would count towards the limit of recompilations.
    torch.compiler.reset()
    images = random_images(args.batch, size, dtype, args.device)
    rows, calls = admit(args, size, dtype, images)
    times, walls = both_clocks(calls, args.rounds, args.device, args.clock)
    for row in rows:
        cell = row['model'], row['form']
        if cell not in calls:
            continue
        row.update(measured(cell, times, walls, args.batch))
        if torch.device(args.device).type == 'cuda':
            row['peak_mib'] = added_peak(calls[cell], args.device)
        else:
            settings = size, dtype, args.batch, args.threads, args.train
            row['peak_mib'] = in_fresh_process(cpu_peak, *cell, *settings)
        if row['model'].startswith('aft'):
            row['profile'] = profile(calls[cell], torch.device(args.device).type)
    return rows


def line(row: dict) -> str:
    start = f'{row["size"]:>4} px {row["dtype"]:<9} {row["model"]:<29}{row["form"]:<9}'
    if 'reason' in row:
        return f'{start}not run: {row["reason"]}'
    text = f'{start}{row["images_per_second"]:9.1f} images/s   peak {row["peak_mib"]:8.1f} MiB'
    for label, title in (('deit', 'DeiT'), ('bound', 'bound'), ('eager', 'eager')):
        if f'speed_vs_{label}' in row:
            text += f'   {row[f"speed_vs_{label}"]:.2f} x {title}'
    return text


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = common_parser(__doc__, DEFAULTS)
    parser.add_argument('--size', type=image_side, nargs='+', help='image sides in px')
    parser.add_argument('--dtype', nargs='+', choices=DTYPES, help='data types')
    parser.add_argument(
        '--models',
        nargs='+',
        type=known_name,
        metavar='MODEL',
        help='deit-ARCH, aft-ARCH-hHEADS-kKERNEL, bound-ARCH-hHEADS-kKERNEL, '
        f'{", ".join(MODEL_RIVALS)}; ARCH: {", ".join(CHANNELS)}',
    )
    parser.add_argument('--forms', nargs='+', choices=FORMS, help='forms of each model')
    parser.add_argument('--batch', type=positive_int, help='images per batch')
    parser.add_argument(
        '--train', action='store_true', help='measure forward and backward with recomputation'
    )
    add_clock(parser)
    args = parser.parse_args(arguments)
    fill_in(parser, args, DEFAULTS)
    if args.train and (args.device != 'cpu' or args.forms != ['eager']):
        parser.error('argument --train: needs --device cpu and --forms eager')
    for name in args.models:
        if parse_name(name)[0] in ('aft', 'bound'):
            with named_in_errors(parser, f'--models {name}'), torch.device('meta'):
                build(name, args.size[0], args.dtype[0], 'meta')
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    set_up_torch(args)
    rows = []
    for size in args.size:
        for dtype in args.dtype:
            added = run_case(args, size, dtype)
            print('\n'.join(map(line, added)), flush=True)
            rows += added
    write_json(args.json, rows, args)


if __name__ == '__main__':
    main()
