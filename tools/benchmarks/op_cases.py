"""The cases of benchmark_ops.py: op, sizes, and other implementations to compare with.

Cases named 'small-*' are suited for a CPU and for timing the oracle.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from aft_mm.ops.cases import Case, conv, decay, full, hard, learned, local, simple

RANK = 64


@dataclass(frozen=True)
class BenchmarkCase(Case):
    """A case with its batch size, and keys multiplied by `key_scale`.

    `rivals` are timed as well, `baseline` is the case whose time is the unit, and `kept` the number
    of random positions that key_mask keeps, None for no mask.
    """

    batch: int = 1
    key_scale: float = 1.0
    rivals: tuple[str, ...] = ()
    baseline: str | None = None
    kept: int | None = None

    def __call__(self, *tensors: Tensor | None, **extra) -> Tensor:
        if self.kept is not None:
            extra['key_mask'] = _mask(self.batch, self.tokens, self.kept, tensors[2].device)
        return super().__call__(*tensors, **extra)

    @property
    def input_shapes(self) -> list[tuple[int, ...]]:
        return self.shapes(self.batch)

    def dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        wide = torch.promote_types(dtype, torch.float32)
        return [dtype] * 3 + [wide] * len(self.parameters)

    def tensors(self, dtype: torch.dtype, device: str) -> list[Tensor]:
        """Return all inputs, randn with a fixed seed; parameters are scaled by 0.1."""
        generator = torch.Generator(device).manual_seed(0)
        scales = [1.0, self.key_scale, 1.0] + [0.1] * len(self.parameters)
        return [
            (torch.randn(shape, generator=generator, device=device) * scale).to(kind)
            for shape, scale, kind in zip(
                self.input_shapes, scales, self.dtypes(dtype), strict=True
            )
        ]


@cache
def _mask(batch: int, tokens: int, kept: int, device: torch.device) -> Tensor:
    order = torch.rand(batch, tokens, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return (order < kept).to(device)


def sized(case: Case, batch: int, **more) -> BenchmarkCase:
    return BenchmarkCase(**vars(case), batch=batch, **more)


def _simple(batch, tokens, channels, causal=True, **more) -> BenchmarkCase:
    return sized(simple(tokens, channels=channels, causal=causal), batch, **more)


def _decay(batch, tokens, channels, causal=True) -> BenchmarkCase:
    return sized(decay(tokens, causal, channels), batch)


def _full(batch, tokens, channels, causal=False, **more) -> BenchmarkCase:
    return sized(full(tokens, causal=causal, channels=channels), batch, **more)


def _local(
    batch, tokens, channels, window, grid=None, causal=True, make=local, **more
) -> BenchmarkCase:
    case = make(tokens, window, grid, causal=causal, rank=RANK, channels=channels)
    return sized(case, batch, **more)


def _conv(batch, grid, channels, heads, kernel, **more) -> BenchmarkCase:
    return sized(conv(grid, (kernel, kernel), heads, channels=channels), batch, **more)


def _hard(batch, tokens, channels, window, grid=None, **more) -> BenchmarkCase:
    return sized(hard(tokens, window, grid, channels=channels), batch, **more)


FULL_RIVALS = ('softmax', 'aft-pytorch-full')
LOCAL_RIVALS = ('softmax-causal', 'dense-local')
KERNELS = 'conv-b16-14x14-d192-h32-k'

CASES: dict[str, BenchmarkCase] = {
    'small-simple': _simple(2, 96, 24),
    'small-decay': _decay(2, 96, 24),
    'small-full': _full(2, 65, 24, rivals=FULL_RIVALS),
    'small-local': _local(2, 130, 24, 16, rivals=LOCAL_RIVALS),
    'small-conv': _conv(2, (7, 9), 24, 4, 5),
    'small-local-hard': _hard(2, 96, 24, 10),
    'small-local-learned': _local(2, 65, 24, 8, make=learned),
    'simple-b8-t4096-d1024': _simple(8, 4096, 1024, rivals=('softmax-causal',)),
    'simple-b1-t16384-d256': _simple(1, 16384, 256, rivals=('softmax-causal',)),
    'simple-b64-t1024-d256': _simple(64, 1024, 256, rivals=('softmax-causal',)),
    'simple-whole-b8-t4096-d1024': _simple(
        8, 4096, 1024, causal=False, rivals=('softmax', 'aft-pytorch-simple')
    ),
    'decay-b8-t512-d256': _decay(8, 512, 256),
    'decay-b2-t4096-d1024': _decay(2, 4096, 1024),
    'decay-whole-b2-t2048-d512': _decay(2, 2048, 512, causal=False),
    'full-b64-t196-d384': _full(64, 196, 384, rivals=FULL_RIVALS),
    'full-b8-t1024-d384': _full(8, 1024, 384, rivals=FULL_RIVALS),
    'full-causal-b4-t2048-d512': _full(4, 2048, 512, causal=True, rivals=('softmax-causal',)),
    'local-b2-t3072-d256-s256': _local(2, 3072, 256, 256, rivals=LOCAL_RIVALS),
    # Keys with a larger range than eager's fast path supports.
    'local-b2-t3072-d256-s256-large-keys': _local(
        2, 3072, 256, 256, key_scale=100.0, baseline='local-b2-t3072-d256-s256'
    ),
    'local-b1-t16384-d256-s256': _local(1, 16384, 256, 256, rivals=('softmax-causal',)),
    'local-b8-t1024-d512-s32': _local(8, 1024, 512, 32, rivals=LOCAL_RIVALS),
    'local-whole-b8-t1024-d512-s32': _local(8, 1024, 512, 32, causal=False, rivals=('softmax',)),
    **{
        f'{KERNELS}{kernel}': _conv(16, (14, 14), 192, 32, kernel, baseline=f'{KERNELS}11')
        for kernel in (3, 5, 7, 9, 11, 13, 15, 19, 23, 25, 27)
    },
    'conv-b128-14x14-d384-h16-k11': _conv(128, (14, 14), 384, 16, 11, rivals=('softmax',)),
    'conv-b128-14x14-d384-h384-k11': _conv(128, (14, 14), 384, 384, 11, rivals=('softmax',)),
    'conv-b128-14x14-d384-h384-k15': _conv(128, (14, 14), 384, 384, 15, rivals=('softmax',)),
    'conv-b32-24x24-d768-h32-k25': _conv(32, (24, 24), 768, 32, 25, rivals=('softmax',)),
    'conv-b32-32x32-d384-h384-k11': _conv(32, (32, 32), 384, 384, 11, rivals=('softmax',)),
    'conv-b2-50x84-d256-h256-k3': _conv(2, (50, 84), 256, 256, 3, rivals=('softmax',)),
    'conv-b2-50x84-d256-h256-k27': _conv(2, (50, 84), 256, 256, 27, rivals=('softmax',)),
    # Tiles of a slide, with gaps.
    'conv-b1-400x400-d192-h32-k11-kept100000': _conv(1, (400, 400), 192, 32, 11, kept=100_000),
    'conv-b1-100x100-d192-h32-k11-kept6250': _conv(1, (100, 100), 192, 32, 11, kept=6_250),
    'local-b1-100x100-d192-s6-kept6250': _local(
        1, 10_000, 192, 6, (100, 100), causal=False, kept=6_250
    ),
    'window-b1-100x100-d192-s12x12-kept6250': _hard(
        1, 10_000, 192, (12, 12), (100, 100), kept=6_250
    ),
    'window-b8-t1024-d512-s32': _hard(8, 1024, 512, 32, rivals=('softmax-causal',)),
    'window-b2-32x96-d256-s16x16': _hard(
        2, 3072, 256, (16, 16), (32, 96), rivals=('softmax-causal',)
    ),
    'local-normalized-b2-t3072-d256-s256': _local(
        2, 3072, 256, 256, make=learned, rivals=('softmax-causal',)
    ),
}
