from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aft_mm.registry import MODELS

from .depthwise_conv import KernelMixer


@MODELS.register_module()
class TokenShift(KernelMixer):
    """Each group of channels comes from one neighbour, a control without learned weights.

    Groups come from the token itself, the previous one along each dimension and, if not causal, the
    next: RWKV's token shift, on an image nearly ShiftViT's (arXiv 2201.10801).

    Args:
        **kwargs: See :class:`AFTMixer`. Without a grid, tokens are a sequence.
    """

    one_hot: Tensor

    def __init__(self, embed_dims: int, **kwargs: Any) -> None:
        super().__init__(embed_dims, 3, **kwargs)
        size = self.kernel_size
        steps = (-1,) if self.causal else (-1, 1)
        entries = [0] + [step * 3**axis for axis in range(len(size)) for step in steps]
        group = torch.arange(embed_dims) * len(entries) // embed_dims
        entry = prod(size) // 2 + torch.tensor(entries)[group]
        one_hot = F.one_hot(entry, prod(size)).float().view(embed_dims, *size)
        self.register_buffer('one_hot', one_hot, persistent=False)

    def kernel(self) -> Tensor:
        return self.one_hot
