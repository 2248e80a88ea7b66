"""A feature pyramid from the one map of a plain backbone."""

from collections.abc import Sequence

import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor, nn

from aft_mm.registry import MODELS


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of a map [B, C, H, W]."""

    def __init__(self, num_channels: int) -> None:
        super().__init__(num_channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Every place on its own, [B, C, H, W] -> [B, C, H, W]."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@MODELS.register_module()
class SimpleFeaturePyramid(BaseModule):
    """The pyramid of ViTDet (arXiv 2203.16527, §3), all levels from the last map of the backbone.

    A finer level is that map after transposed convolutions of stride 2, each of which halves the
    channels, with norm and GELU between them; a coarser one after max pooling. Each level ends in a
    1 × 1 and a 3 × 3 convolution with norms. Of a map [B, D, H, W], a level that is n times finer
    has n·H × n·W places and one that is n times coarser ``⌈H / n⌉ × ⌈W / n⌉``.

    Args:
        in_channels: channels D of the map.
        out_channels: channels of every level.
        in_stride: pixels from one place of the map to the next, the patch_size of the backbone.
        strides: of the levels, ascending; each is in_stride times a power of 2, and a finer one
            n times so must leave D / n channels.
        num_outs: number of levels; those beyond strides take every second place of the level
            before them, as FPN does for detectors that want a fifth level. None for one per stride.
        init_cfg: see mmengine's BaseModule.

    Raises ValueError for an argument outside these ranges.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 256,
        in_stride: int = 16,
        strides: Sequence[int] = (4, 8, 16, 32),
        num_outs: int | None = None,
        init_cfg: dict | list[dict] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        self.in_channels = in_channels
        if not strides or list(strides) != sorted(set(strides)):
            raise ValueError(f'strides must be ascending and not empty, got {tuple(strides)}')
        self.num_outs = len(strides) if num_outs is None else num_outs
        if self.num_outs < len(strides):
            raise ValueError(
                f'num_outs must be at least {len(strides)}, one per stride, got {num_outs}'
            )
        self.levels = nn.ModuleList(
            _level(in_channels, out_channels, in_stride, stride) for stride in strides
        )

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The maps of the backbone, of which there must be one, [B, D, H, W]; one map per level."""
        if len(inputs) != 1:
            raise ValueError(
                f'SimpleFeaturePyramid takes 1 map, that of one layer in out_indices of the '
                f'backbone, got {len(inputs)}'
            )
        # Contiguous: mmcv's RoIAlign reads memory in this order whatever the strides of a map say.
        outputs = [level(inputs[0]).contiguous() for level in self.levels]
        while len(outputs) < self.num_outs:
            outputs.append(F.max_pool2d(outputs[-1], kernel_size=1, stride=2))
        return tuple(outputs)


def _level(in_channels: int, out_channels: int, in_stride: int, stride: int) -> nn.Sequential:
    finer, coarser = max(in_stride // max(stride, 1), 1), max(stride // in_stride, 1)
    # A number is a power of 2 if it has one bit.
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
