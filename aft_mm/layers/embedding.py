"""Embeddings of patches, tokens, pixels and positions."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import check_flag, check_int, check_sizes, refuse
from aft_mm.registry import MODELS

from .grid import Grid, GridParameters

__all__ = [
    'FrameEmbedding',
    'PatchEmbedding',
    'PixelEmbedding',
    'PositionEmbedding',
    'SinusoidalPositions',
    'TokenEmbedding',
]


class PatchEmbedding(nn.Module):
    """Cut an image into patches and project each, ``[B, C, H, W] -> [B, H'·W', D]``.

    ``H' = ⌈H / patch⌉``: an image that the patch does not divide is padded with zeros at the bottom
    and on the right. Raises ValueError for a patch size below 1.
    """

    def __init__(self, in_channels: int, embed_dims: int, patch_size: int) -> None:
        super().__init__()
        check_int('in_channels', in_channels, 1)
        check_int('embed_dims', embed_dims, 1)
        check_int('patch_size', patch_size, 1)
        self.patch_size = patch_size
        self.projection = nn.Conv2d(in_channels, embed_dims, patch_size, stride=patch_size)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """The grid (H', W') of an image of this size."""
        # Not -(-height // patch): ONNX rounds the quotient of a negative number towards zero.
        return tuple((n + self.patch_size - 1) // self.patch_size for n in (height, width))

    def forward(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Tokens [B, H'·W', D] and the grid (H', W')."""
        height, width = image.shape[2:]
        grid = self.grid_of(height, width)
        bottom, right = grid[0] * self.patch_size - height, grid[1] * self.patch_size - width
        # In an exported graph of any size they are no ints, and the patch may divide them or not.
        if not isinstance(bottom, int) or not isinstance(right, int) or bottom or right:
            image = F.pad(image, (0, right, 0, bottom))
        tokens = self.projection(image).flatten(2).transpose(1, 2)
        # The residual stream inherits this layout: token-major here saves a copy in every layer.
        return tokens.contiguous(), grid


class PositionEmbedding(GridParameters):
    """One learned vector per token, [T, D], truncated N(0, 0.02²) at the start.

    Interpolated for another grid, see :class:`GridParameters`.
    """

    def __init__(self, grid: Sequence[int], embed_dims: int, num_prefix_tokens: int = 0) -> None:
        super().__init__(grid, num_prefix_tokens)
        check_int('embed_dims', embed_dims, 1)
        self.weight = nn.Parameter(torch.empty(self.num_tokens, embed_dims))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, grid: Grid | None = None) -> Tensor:
        """The vectors [T, D] of the tokens of `grid`."""
        return self.on_grid(self.weight, grid)


class SinusoidalPositions(nn.Module):
    """A fixed vector per token, [T, D], of wavelengths from 2π to 10,000·2π.

    ``p_t = [sin(t / 10000^(2i/D)), cos(t / 10000^(2i/D))]`` for i = 0 … D/2 − 1, sine and cosine in
    turn (arXiv 1706.03762, §3.5). It is no part of a checkpoint. Raises ValueError for an odd D and
    for a grid of more than one dimension.
    """

    table: Tensor

    def __init__(self, grid: Sequence[int], embed_dims: int) -> None:
        super().__init__()
        check_sizes('grid of sinusoidal positions', grid, (1,))
        if embed_dims % 2:
            refuse('embed_dims with sinusoidal positions', 'even', embed_dims)
        self.num_tokens = grid[0]
        rate = 10000.0 ** (-torch.arange(0, embed_dims, 2, dtype=torch.float64) / embed_dims)
        angle = torch.arange(self.num_tokens, dtype=torch.float64)[:, None] * rate
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        self.register_buffer('table', table.to(torch.get_default_dtype()), persistent=False)

    def forward(self) -> Tensor:
        """The vectors [T, D]."""
        return self.table


@MODELS.register_module()
class TokenEmbedding(nn.Module):
    """One learned vector per token value, ``[B, T] -> [B, T, D]``, N(0, 0.02²) truncated.

    Args:
        embed_dims: channels D.
        vocab_size: number of values V; tokens are 0 … V − 1.
        num_kinds: kinds of tokens that take turns, such as 3 for sub-pixels R, G, B, R, …; they
            share the table [V, D], and above 1 a learned vector tells the kind.
        scaled: multiply by √D what starts with the standard deviation 1/√D, as beside sinusoidal
            positions, whose vectors are long (arXiv 1706.03762, §3.4).
    """

    token_shape = ()

    def __init__(
        self, embed_dims: int, vocab_size: int, num_kinds: int = 1, scaled: bool = False
    ) -> None:
        super().__init__()
        check_int('embed_dims', embed_dims, 1)
        check_int('vocab_size', vocab_size, 1)
        check_int('num_kinds', num_kinds, 1)
        check_flag('scaled', scaled)
        self.num_values = vocab_size
        self.scale = embed_dims**0.5 if scaled else 1.0
        self.num_kinds = num_kinds
        self.weight = nn.Parameter(torch.empty(vocab_size, embed_dims))
        self.register_parameter('kind', None)
        if num_kinds > 1:
            self.kind = nn.Parameter(torch.empty(num_kinds, embed_dims))
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=1 / self.scale if scaled else 0.02)

    def forward(self, tokens: Tensor, position: Tensor | None = None) -> Tensor:
        """tokens [B, T] of any integer type; position [B] is that of the first token, 0 unless
        given, as it is in steps. Raises ValueError for another shape and for a token outside the
        vocabulary, in steps on a CPU only, see :meth:`SequenceDecoder.step`.
        """
        if not isinstance(tokens, Tensor) or tokens.dim() != 2:
            refuse('tokens', 'a tensor [B, T]', tokens)
        _check_values('token', tokens, self.num_values, in_step=position is not None)
        x = F.embedding(tokens.long(), self.weight)
        if self.scale != 1:
            x = x * self.scale
        if self.kind is None:
            return x
        index = torch.arange(tokens.shape[1], device=tokens.device)
        if position is not None:
            index = index + position[:, None]
        return x + F.embedding(index % self.num_kinds, self.kind)


@MODELS.register_module()
class PixelEmbedding(nn.Module):
    """Whole pixels as real numbers, ``x / 127.5 − 1`` through a linear layer, -> [B, T, D].

    Args:
        embed_dims: channels D.
        num_channels: colours C of a pixel, values 0 … 255; with 1 the tokens may be [B, T] too.
    """

    num_values = 256

    def __init__(self, embed_dims: int, num_channels: int) -> None:
        super().__init__()
        check_int('embed_dims', embed_dims, 1)
        check_int('num_channels', num_channels, 1)
        self.token_shape = () if num_channels == 1 else (num_channels,)
        self.projection = nn.Linear(num_channels, embed_dims)

    def forward(self, tokens: Tensor, position: Tensor | None = None) -> Tensor:
        """tokens [B, T, C] of any integer type; position is given in steps. Raises ValueError for
        another number of channels and for a value outside 0 … 255, in steps on a CPU only.
        """
        channels = self.projection.in_features
        if isinstance(tokens, Tensor) and tokens.dim() == 2 and channels == 1:
            tokens = tokens.unsqueeze(-1)
        fits = isinstance(tokens, Tensor) and tokens.dim() == 3
        if not fits or tokens.shape[-1] != channels:
            refuse('pixels', f'a tensor [B, T, {channels}]', tokens)
        _check_values('pixel value', tokens, self.num_values, in_step=position is not None)
        return self.projection(tokens.to(self.projection.weight.dtype) / 127.5 - 1)


@MODELS.register_module()
class FrameEmbedding(nn.Module):
    """Frames of real features, such as filter banks, through a linear layer, -> [B, T, D].

    Args:
        embed_dims: channels D.
        num_features: features F of a frame.
    """

    def __init__(self, embed_dims: int, num_features: int) -> None:
        super().__init__()
        check_int('embed_dims', embed_dims, 1)
        check_int('num_features', num_features, 1)
        self.projection = nn.Linear(num_features, embed_dims)

    def forward(self, frames: Tensor) -> Tensor:
        """frames [B, T, F] of floats; ValueError for another number of features."""
        size = self.projection.in_features
        floats = isinstance(frames, Tensor) and frames.is_floating_point()
        if not floats or frames.dim() != 3 or frames.shape[-1] != size:
            refuse('frames', f'a tensor of floats [B, T, {size}]', frames)
        return self.projection(frames.to(self.projection.weight.dtype))


def _check_values(what: str, tokens: Tensor, size: int, in_step: bool) -> None:
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        refuse(f'a {what}', 'an integer', tokens)
    # A compiled graph cannot look at values; an index outside the table stops it by itself.
    if torch.compiler.is_compiling() or not tokens.numel():
        return
    # A look at one token on a device would cost more than the step.
    if in_step and tokens.device.type != 'cpu':
        return
    low, high = (int(value) for value in tokens.aminmax())
    if low < 0 or high >= size:
        raise ValueError(f'a {what} must be 0 to {size - 1}, got {low if low < 0 else high}')
