"""Patch embedding and position embedding."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .grid import Grid, GridParameters

__all__ = ['PatchEmbedding', 'PositionEmbedding']


class PatchEmbedding(nn.Module):
    """Cut an image into patches and project each, ``[B, C, H, W] -> [B, H'·W', D]``.

    ``H' = ⌈H / patch⌉``: an image that the patch does not divide is padded with zeros at the bottom
    and on the right. Raises ValueError for a patch size below 1.
    """

    def __init__(self, in_channels: int, embed_dims: int, patch_size: int) -> None:
        super().__init__()
        if patch_size < 1:
            raise ValueError(f'patch_size must be 1 or larger, got {patch_size}')
        self.patch_size = patch_size
        self.projection = nn.Conv2d(in_channels, embed_dims, patch_size, stride=patch_size)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """The grid (H', W') of an image of this size."""
        return -(-height // self.patch_size), -(-width // self.patch_size)

    def forward(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Tokens [B, H'·W', D] and the grid (H', W')."""
        height, width = image.shape[2:]
        bottom, right = -height % self.patch_size, -width % self.patch_size
        if bottom or right:
            image = F.pad(image, (0, right, 0, bottom))
        tokens = self.projection(image).flatten(2).transpose(1, 2)
        # The residual stream inherits this layout: token-major here saves a copy in every layer.
        return tokens.contiguous(), self.grid_of(height, width)


class PositionEmbedding(GridParameters):
    """One learned vector per token, [T, D], truncated N(0, 0.02²) at the start.

    Interpolated for another grid, see :class:`GridParameters`.
    """

    def __init__(self, grid: Sequence[int], embed_dims: int, num_prefix_tokens: int = 0) -> None:
        super().__init__(grid, num_prefix_tokens)
        self.weight = nn.Parameter(torch.empty(self.num_tokens, embed_dims))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, grid: Grid | None = None) -> Tensor:
        """The vectors [T, D] of the tokens of `grid`."""
        return self.on_grid(self.weight, grid)
