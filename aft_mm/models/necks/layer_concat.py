from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.checks import check_int, refuse
from aft_mm.openmmlab import BaseModule
from aft_mm.registry import MODELS


@MODELS.register_module()
class LayerConcat(BaseModule):
    """Join the vectors [B, D] of n layers, each normalised to mean 0 and variance 1, to [B, n·D].

    Args:
        in_channels: Channels D of a layer.

    Raises:
        ValueError: The backbone returns maps instead of vectors, or of another width.
    """

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        check_int('in_channels', in_channels, 1)
        self.in_channels = in_channels

    def forward(self, layers: Sequence[Tensor]) -> tuple[Tensor]:
        for x in layers:
            if x.dim() != 2 or x.shape[1] != self.in_channels:
                refuse('layers', f'vectors [B, {self.in_channels}]', x)
        return (torch.cat([F.layer_norm(x, x.shape[1:]) for x in layers], 1),)
