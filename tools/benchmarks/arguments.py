"""Options and names that the benchmarks share; imports nothing slow."""

import argparse
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DTYPES = ('float32', 'float16', 'bfloat16')
# Clocks for a CPU. 'cpu' sums over the threads of this process and excludes other processes.
CLOCKS = dict(wall=time.perf_counter, cpu=time.process_time)

# Mixers with a window as suffix of the name, such as aft-local-32.
WINDOWED = {
    'aft-local': dict(type='aft_mm.AFTLocal', rank=64),
    'dense-aft-local': dict(type='aft_mm.DenseAFTLocal', rank=64),
    'aft-local-learned': dict(type='aft_mm.AFTLocalLearned', rank=64),
    'aft-local-hard': dict(type='aft_mm.AFTLocalHard'),
}
PLAIN = {
    'aft-simple': dict(type='aft_mm.AFTSimple'),
    'aft-full': dict(type='aft_mm.AFTFull', rank=64),
    'bound': dict(type='aft_mm.NoMixing'),
}
WITH_HEADS = {
    'aft-conv': dict(type='aft_mm.AFTConv', kernel_size=31),
    'softmax': dict(type='aft_mm.SoftmaxAttention'),
    'dense-softmax': dict(type='aft_mm.DenseSoftmaxAttention'),
    'linear': dict(type='aft_mm.LinearAttention'),
    'performer': dict(type='aft_mm.PerformerAttention'),
    **{f'lsh-{n}': dict(type='aft_mm.LSHAttention', num_rounds=n) for n in (1, 4, 8)},
}
MIXER_NAMES = (
    f'{", ".join([*PLAIN, *WITH_HEADS])}, {", ".join(f"{name}-WINDOW" for name in WINDOWED)}, '
    'or a registered mixer with its arguments by name, such as aft_mm.AFTSimple or '
    '"aft_mm.AFTLocal(window=32, rank=None)"'
)

CHANNELS = dict(tiny=192, small=384, base=768)
PATCH = 16
# Models of timm, and the DeiT with about as many parameters.
MODEL_RIVALS = dict(
    deit3_small_patch16_224='small',
    vit_relpos_small_patch16_224='small',
    convnext_tiny='small',
    convnext_femto='tiny',
    efficientvit_b1='tiny',
    edgenext_small='tiny',
    pit_s_224='small',
    cpubone_b1_bfrobust='small',
    efficientnet_lite0='tiny',
)


def positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'must be a whole number of at least 1, got {text!r}')
    return int(text)


def device(text: str) -> str:
    kind, _, index = text.partition(':')
    if text not in ('cpu', 'cuda') and (kind != 'cuda' or not index.isdecimal()):
        raise argparse.ArgumentTypeError(f'must be cpu, cuda or cuda:INDEX, got {text!r}')
    return text


@contextmanager
def named_in_errors(parser: argparse.ArgumentParser, option: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        parser.error(f'argument {option}: {error}')


def common_parser(
    doc: str, defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the common options, described by the first line of `doc`.

    `defaults` are those per type of device, see :func:`record.fill_in`.
    """
    epilog = ' '.join(f'Defaults on {k}: {_written(v)}.' for k, v in (defaults or {}).items())
    parser = argparse.ArgumentParser(description=doc.splitlines()[0], epilog=epilog)
    parser.add_argument('--rounds', type=positive_int, help='number of timings of each candidate')
    parser.add_argument(
        '--device', type=device, help='cpu, cuda or cuda:INDEX; default: a GPU if available'
    )
    parser.add_argument(
        '--threads', type=positive_int, help='number of CPU threads; default: that of torch'
    )
    parser.add_argument('--json', type=Path, help='write rows and environment to this file')
    return parser


def add_clock(parser: argparse.ArgumentParser, default: str = 'wall') -> None:
    parser.add_argument(
        '--clock',
        choices=CLOCKS,
        default=default,
        help='clock on a CPU: wall time or CPU time; default %(default)s',
    )


def _written(options: Mapping[str, Any]) -> str:
    values = {k: v if isinstance(v, list) else [v] for k, v in options.items()}
    return ' '.join(f'--{k} {" ".join(map(str, v))}' for k, v in values.items())


def parse_name(text: str) -> tuple[str, str, int, int]:
    """Split 'deit-tiny', 'aft-small-h384-k11' or 'bound-tiny-h32-k11': kind, size, heads, kernel.

    The size of a rival is that of the DeiT it is compared with.
    """
    if text in MODEL_RIVALS:
        return 'rival', MODEL_RIVALS[text], 0, 0
    archs = '|'.join(CHANNELS)
    if match := re.fullmatch(f'deit-({archs})', text):
        return 'deit', match[1], 0, 0
    if match := re.fullmatch(rf'(aft|bound)-({archs})-h(\d+)-k(\d+)', text):
        return match[1], match[2], int(match[3]), int(match[4])
    raise argparse.ArgumentTypeError(
        'a model must be deit-ARCH, aft-ARCH-hHEADS-kKERNEL or bound-ARCH-hHEADS-kKERNEL with '
        f'ARCH among {", ".join(CHANNELS)}, or one of {", ".join(MODEL_RIVALS)}, got {text!r}'
    )


def known_name(text: str) -> str:
    parse_name(text)
    return text


def image_side(text: str) -> int:
    if positive_int(text) % PATCH:
        raise argparse.ArgumentTypeError(f'must be a multiple of {PATCH}, got {text!r}')
    return int(text)
