"""The cases that benchmark_ops.py measures: an op, its shapes, and what it is held against.

A name that begins with 'small-' fits a CPU and the oracle as a backend.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aft_mm import ops

RANK = 64


@dataclass(frozen=True)
class Case:
    """An op on query [B, T, D], key [B, T, h], value [B, T, D] and parameters of these shapes.

    rivals: names of :data:`rivals.RIVALS` that take turns with the backends. baseline: a case that
    takes turns with this one, whose time is the unit of this one's.
    """

    op: str
    batch: int
    tokens: int
    channels: int
    options: dict[str, Any] = field(default_factory=dict)
    parameters: tuple[tuple[int, ...], ...] = ()
    heads: int | None = None
    key_scale: float = 1.0
    rivals: tuple[str, ...] = ()
    baseline: str | None = None

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of all inputs."""
        tokens = (self.batch, self.tokens)
        return [
            (*tokens, self.channels),
            (*tokens, self.heads or self.channels),
            (*tokens, self.channels),
            *self.parameters,
        ]

    @property
    def all_options(self) -> dict[str, Any]:
        """Every keyword of the op, defaults included."""
        keywords = inspect.signature(getattr(ops, self.op)).parameters.values()
        defaults = {p.name: p.default for p in keywords if p.kind == p.KEYWORD_ONLY}
        return {**defaults, **self.options}

    def inputs(self, dtype: torch.dtype, device: str) -> list[Tensor]:
        """All inputs, randn, the same each time; parameters are a tenth of that.

        Parameters are float32 where the tokens have less, as autocast leaves them in training.
        """
        generator = torch.Generator(device).manual_seed(0)
        scales = [1.0, self.key_scale, 1.0] + [0.1] * len(self.parameters)
        wide = torch.promote_types(dtype, torch.float32)
        dtypes = [dtype] * 3 + [wide] * len(self.parameters)
        return [
            (torch.randn(shape, generator=generator, device=device) * scale).to(kind)
            for shape, scale, kind in zip(self.shapes, scales, dtypes, strict=True)
        ]

    def __call__(self, *tensors: Tensor) -> Tensor:
        return getattr(ops, self.op)(*tensors, **self.options)


def _simple(batch, tokens, channels, causal=True, **more) -> Case:
    return Case('aft_simple', batch, tokens, channels, dict(causal=causal), **more)


def _full(batch, tokens, channels, causal=False, **more) -> Case:
    bias = ((tokens, tokens),)
    return Case('aft_full', batch, tokens, channels, dict(causal=causal), bias, **more)


def _local(batch, tokens, channels, window, causal=True, op='aft_local', **more) -> Case:
    factors = ((tokens, RANK), (tokens, RANK))
    return Case(op, batch, tokens, channels, dict(window=window, causal=causal), factors, **more)


def _conv(batch, grid: Sequence[int], channels, heads, kernel, **more) -> Case:
    weight = ((heads, kernel, kernel),)
    options = dict(grid=tuple(grid))
    return Case('aft_conv', batch, math.prod(grid), channels, options, weight, heads, **more)


def _window(batch, tokens, channels, window, grid=None, **more) -> Case:
    options = dict(window=window, grid=grid)
    return Case('aft_local_hard', batch, tokens, channels, options, **more)


FULL_RIVALS = ('softmax', 'aft-pytorch-full')
SCAN_RIVALS = ('softmax-causal', 'fla-rwkv4', 'fla-retention')
LOCAL_RIVALS = ('softmax-causal', 'dense-local')
KERNELS = 'conv-b16-14x14-d192-h32-k'

CASES: dict[str, Case] = {
    'small-simple': _simple(2, 96, 24),
    'small-full': _full(2, 65, 24, rivals=FULL_RIVALS),
    'small-local': _local(2, 130, 24, 16, rivals=LOCAL_RIVALS),
    'small-conv': _conv(2, (7, 9), 24, 4, 5),
    'small-window': _window(2, 96, 24, 10),
    'small-local-normalized': _local(2, 65, 24, 8, op='aft_local_learned'),
    # Many sequences, a single long one, and sums without an order.
    'simple-b8-t4096-d1024': _simple(8, 4096, 1024, rivals=SCAN_RIVALS),
    'simple-b1-t16384-d256': _simple(1, 16384, 256, rivals=SCAN_RIVALS),
    'simple-b64-t1024-d256': _simple(64, 1024, 256, rivals=SCAN_RIVALS),
    'simple-whole-b8-t4096-d1024': _simple(
        8, 4096, 1024, causal=False, rivals=('softmax', 'aft-pytorch-simple')
    ),
    'full-b64-t196-d384': _full(64, 196, 384, rivals=FULL_RIVALS),
    'full-b8-t1024-d384': _full(8, 1024, 384, rivals=FULL_RIVALS),
    'full-causal-b4-t2048-d512': _full(4, 2048, 512, causal=True, rivals=('softmax-causal',)),
    'local-b2-t3072-d256-s256': _local(2, 3072, 256, 256, rivals=LOCAL_RIVALS),
    # Keys that spread over more than eager's fast path takes.
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
    'window-b8-t1024-d512-s32': _window(8, 1024, 512, 32, rivals=('softmax-causal',)),
    'window-b2-32x96-d256-s16x16': _window(
        2, 3072, 256, (16, 16), (32, 96), rivals=('softmax-causal',)
    ),
    'local-normalized-b2-t3072-d256-s256': _local(
        2, 3072, 256, 256, op='aft_local_learned', rivals=('softmax-causal',)
    ),
}
