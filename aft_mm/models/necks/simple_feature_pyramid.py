from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import check_int, is_int, refuse
from aft_mm.layers import Resettable
from aft_mm.openmmlab import BaseModule
from aft_mm.registry import MODELS


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of a map [B, C, H, W]."""

    def __init__(self, num_channels: int) -> None:
        super().__init__(num_channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@MODELS.register_module()
class SimpleFeaturePyramid(Resettable, BaseModule):
    """The feature pyramid of ViTDet: all levels from one map (arXiv 2203.16527, §3).

    Finer levels use transposed convolutions of stride 2, which halve the channels, coarser ones,
    ``⌈H / n⌉ × ⌈W / n⌉``, max pooling. Each ends in a 1 × 1 and a 3 × 3 convolution with norms.

    Args:
        in_channels: Channels D of the map.
        out_channels: Channels of every level.
        in_stride: Stride of the map [px], the patch_size of the backbone.
        strides: Ascending strides of the levels [px], in_stride times powers of 2. A level n times
            finer needs D divisible by n.
        num_outs: Number of levels, by default one per stride; further ones subsample the level
            before.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 256,
        in_stride: int = 16,
        strides: Sequence[int] = (4, 8, 16, 32),
        num_outs: int | None = None,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.in_channels = in_channels
        check_int('in_channels', in_channels, 1)
        check_int('out_channels', out_channels, 1)
        check_int('in_stride', in_stride, 1)
        ascending = isinstance(strides, Sequence) and all(map(is_int, strides))
        if not ascending or not strides or list(strides) != sorted(set(strides)):
            refuse('strides', 'ascending ints, one or more', strides)
        self.num_outs = len(strides) if num_outs is None else num_outs
        check_int('num_outs', self.num_outs, len(strides))
        self.levels = nn.ModuleList(
            _level(in_channels, out_channels, in_stride, stride) for stride in strides
        )

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return one map per level for the only map [B, D, H, W]; ValueError for another."""
        if len(inputs) != 1:
            raise ValueError(
                'inputs of SimpleFeaturePyramid must be 1 map, of one layer in out_indices of the '
                f'backbone, got {len(inputs)}'
            )
        if inputs[0].dim() != 4 or inputs[0].shape[1] != self.in_channels:
            raise ValueError(
                f'inputs of SimpleFeaturePyramid must be a map [B, {self.in_channels}, H, W], got '
                f"{list(inputs[0].shape)}; AFTViT returns its map with out_type='featmap', and "
                'in_channels must be its embed_dims'
            )
        # mmcv's RoIAlign ignores strides.
        outputs = [level(inputs[0]).contiguous() for level in self.levels]
        while len(outputs) < self.num_outs:
            outputs.append(F.max_pool2d(outputs[-1], kernel_size=1, stride=2))
        return tuple(outputs)


def _level(in_channels: int, out_channels: int, in_stride: int, stride: int) -> nn.Sequential:
    finer, coarser = max(in_stride // max(stride, 1), 1), max(stride // in_stride, 1)
    # A power of 2 has one bit.
    if stride * finer != in_stride * coarser or (finer * coarser).bit_count() != 1:
        raise ValueError(
            f'strides must be in_stride={in_stride}, the patch size, times a power of 2, '
            f'got {stride}'
        )
    if in_channels % finer:
        raise ValueError(
            f'in_channels must be divisible by {finer} for stride {stride}, got {in_channels}'
        )
    layers: list[nn.Module] = []
    channels = in_channels
    for _ in range(finer.bit_length() - 1):
        if layers:
            layers += [ChannelNorm(channels), nn.GELU()]
        layers.append(nn.ConvTranspose2d(channels, channels // 2, 2, stride=2))
        channels //= 2
    if coarser > 1:
        layers.append(nn.MaxPool2d(coarser, ceil_mode=True))
    return nn.Sequential(
        *layers,
        nn.Conv2d(channels, out_channels, 1, bias=False),
        ChannelNorm(out_channels),
        nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False),
        ChannelNorm(out_channels),
    )
