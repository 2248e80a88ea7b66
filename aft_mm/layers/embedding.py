from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import check_flag, check_int, check_sizes, refuse
from aft_mm.registry import MODELS

from .grid import Grid, GridParameters, check_kernel
from .projections import has_hooks
from .resetting import Resettable


class PatchEmbedding(Resettable):
    """Linear projection of image patches, ``[B, C, H, W] -> [B, H'·W', D]``.

    ``H' = ⌈H / patch⌉``; images are padded with zeros at the bottom and on the right.

    Args:
        in_channels: Channels C of the image.
        embed_dims: Channels D of a token.
        patch_size: Side of a patch [px].
    """

    def __init__(self, in_channels: int, embed_dims: int, patch_size: int) -> None:
        super().__init__()
        check_int('in_channels', in_channels, 1)
        check_int('embed_dims', embed_dims, 1)
        check_int('patch_size', patch_size, 1)
        self.in_channels = in_channels
        self.patch_size = patch_size
        self.projection = nn.Conv2d(in_channels, embed_dims, patch_size, stride=patch_size)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the grid (H', W') of an image of this size [px]."""
        # ONNX rounds the quotient of a negative number towards zero.
        patch = self.patch_size
        return (height + patch - 1) // patch, (width + patch - 1) // patch

    def forward(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return tokens [B, H'·W', D] and the grid (H', W')."""
        image, grid = self._padded(image)
        conv = self.projection
        if type(conv) is nn.Conv2d and not has_hooks(conv) and is_convolved_slowly(image):
            return self._product(image), grid
        tokens = self.projection(image).flatten(2).transpose(1, 2)
        # Saves a copy in every layer.
        return tokens.contiguous(), grid

    def _padded(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        height, width = image.shape[2:]
        grid = self.grid_of(height, width)
        bottom, right = grid[0] * self.patch_size - height, grid[1] * self.patch_size - width
        # Sizes of an export are not ints.
        if not isinstance(bottom, int) or not isinstance(right, int) or bottom or right:
            image = F.pad(image, (0, right, 0, bottom))
        return image, grid

    def _product(self, image: Tensor) -> Tensor:
        patch = self.patch_size
        patches = image.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [B, C, H', p, W', p]
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(patches, self.projection.weight.flatten(1), self.projection.bias)


def is_convolved_slowly(x: Tensor) -> bool:
    """Return whether x is convolved in half precision."""
    # With AMX, oneDNN takes 90 ms instead of 1 at 512 px; cuDNN leaves tensor cores idle.
    device = x.device.type
    if device not in ('cpu', 'cuda'):
        return False
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return dtype == torch.bfloat16 or (device == 'cuda' and dtype == torch.float16)


class ConvPatchEmbedding(PatchEmbedding):
    """Convolutions that replace the projection of :class:`PatchEmbedding` (arXiv 2104.05704).

    log₂(patch) times a 3 × 3 convolution, max pooling by 2, batch norm and ReLU.

    Args:
        in_channels: Channels C of the image.
        embed_dims: Channels D of a token, a multiple of patch / 2.
        patch_size: Side of a patch [px], a power of two from 2 on.
    """

    def __init__(self, in_channels: int, embed_dims: int, patch_size: int) -> None:
        super().__init__(in_channels, embed_dims, patch_size)
        if patch_size < 2 or patch_size & (patch_size - 1):
            refuse('patch_size of a convolutional stem', 'a power of two from 2 on', patch_size)
        if embed_dims % (patch_size // 2):
            refuse('embed_dims', f'a multiple of {patch_size // 2}', embed_dims)
        layers: list[nn.Module] = []
        dims = embed_dims // (patch_size // 2)
        while dims <= embed_dims:
            conv = nn.Conv2d(in_channels, dims, 3, padding=1, bias=False)
            layers += [conv, nn.MaxPool2d(2), nn.BatchNorm2d(dims), nn.ReLU()]
            in_channels, dims = dims, 2 * dims
        stem = nn.Sequential(*layers)
        # Twice as fast on a CPU.
        self.projection = stem.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(
        self, image: Tensor, inside: Tensor | None = None
    ) -> tuple[Tensor, tuple[int, int]]:
        """Return tokens [B, H'·W', D] and the grid; where inside [B, 1, H, W] is 0, maps are 0."""
        if inside is None:
            return super().forward(image)
        (image, grid), (inside, _) = self._padded(image), self._padded(inside)
        for layer in self.projection.children():
            image = layer(image)
            if isinstance(layer, nn.MaxPool2d):
                inside = layer(inside)
            elif isinstance(layer, nn.ReLU):
                image = image * inside
        return image.flatten(2).transpose(1, 2).contiguous(), grid


class PositionEmbedding(GridParameters):
    """One learned vector per token, [T, D], initialised from truncated N(0, 0.02²)."""

    def __init__(self, grid: Sequence[int], embed_dims: int, num_prefix_tokens: int = 0) -> None:
        super().__init__(grid, num_prefix_tokens)
        check_int('embed_dims', embed_dims, 1)
        self.weight = nn.Parameter(torch.empty(self.num_tokens, embed_dims))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, grid: Grid | None = None) -> Tensor:
        return self.on_grid(self.weight, grid)


class SinusoidalPositions(Resettable):
    """Fixed sinusoidal vectors, one per token, [T, D] (arXiv 1706.03762, §3.5).

    ``p_t = [sin(t / 10000^(2i/D)), cos(t / 10000^(2i/D))]`` for i = 0 … D/2 − 1, alternating.

    Args:
        grid: (T,).
        embed_dims: Channels D, even.
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
        return self.table


@MODELS.register_module()
class TokenEmbedding(Resettable):
    """One learned vector per token value, ``[B, T] -> [B, T, D]``, from truncated N(0, 0.02²).

    Args:
        vocab_size: Number of values V; tokens are 0 … V − 1.
        num_kinds: Alternating kinds of tokens, such as 3 for R, G, B; each adds a learned vector.
        scaled: Initialise with deviation 1/√D and multiply by √D (arXiv 1706.03762, §3.4).
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
        """Embed tokens [B, T] of any integer type; in a step `position` [B] is the index of the
        first.

        Raises:
            ValueError: Another shape, or a token outside the vocabulary (in steps on a CPU only).
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
class PixelEmbedding(Resettable):
    """Linear projection of whole pixels scaled to [−1, 1], ``W (x / 127.5 − 1) + b``.

    Args:
        num_channels: Colours C of a pixel; with 1, tokens may be [B, T].
    """

    num_values = 256

    def __init__(self, embed_dims: int, num_channels: int) -> None:
        super().__init__()
        check_int('embed_dims', embed_dims, 1)
        check_int('num_channels', num_channels, 1)
        self.token_shape = () if num_channels == 1 else (num_channels,)
        self.projection = nn.Linear(num_channels, embed_dims)

    def forward(self, tokens: Tensor, position: Tensor | None = None) -> Tensor:
        """Embed pixels [B, T, C] of any integer type; `position` marks a step.

        Raises:
            ValueError: Another number of channels, or a value outside 0 … 255 (in steps on a CPU
                only).
        """
        channels = self.projection.in_features
        if isinstance(tokens, Tensor) and tokens.dim() == 2 and channels == 1:
            tokens = tokens.unsqueeze(-1)
        fits = isinstance(tokens, Tensor) and tokens.dim() == 3
        if not fits or tokens.shape[-1] != channels:
            refuse('pixels', f'a tensor [B, T, {channels}]', tokens)
        _check_values('pixel value', tokens, self.num_values, in_step=position is not None)
        vectors: Tensor = self.projection(tokens.to(self.projection.weight.dtype) / 127.5 - 1)
        return vectors


@MODELS.register_module()
class FrameEmbedding(Resettable):
    """Linear projection of frames, such as filter banks."""

    def __init__(self, embed_dims: int, num_features: int) -> None:
        super().__init__()
        check_int('embed_dims', embed_dims, 1)
        check_int('num_features', num_features, 1)
        self.projection = nn.Linear(num_features, embed_dims)

    def forward(self, frames: Tensor, position: Tensor | None = None) -> Tensor:
        """Return vectors [B, T, D] for float frames [B, T, F], at any `position` of a step."""
        size = self.projection.in_features
        floats = isinstance(frames, Tensor) and frames.is_floating_point()
        if not floats or frames.dim() != 3 or frames.shape[-1] != size:
            refuse('frames', f'a tensor of floats [B, T, {size}]', frames)
        vectors: Tensor = self.projection(frames.to(self.projection.weight.dtype))
        return vectors


@MODELS.register_module()
class ConvFrameEmbedding(FrameEmbedding):
    """Convolutions over time in front of the blocks.

    The projection of :class:`FrameEmbedding`, then per layer ``x + relu(LayerNorm(conv(x)))``.

    Args:
        kernel_size: Frames of a kernel, odd.
    """

    def __init__(
        self, embed_dims: int, num_features: int, num_layers: int = 2, kernel_size: int = 5
    ) -> None:
        super().__init__(embed_dims, num_features)
        check_int('num_layers', num_layers, 1)
        (size,) = check_kernel(kernel_size, (1,))
        self.convs = nn.ModuleList(
            nn.Conv1d(embed_dims, embed_dims, size, padding=size // 2) for _ in range(num_layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(embed_dims) for _ in range(num_layers))

    def forward(self, frames: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return vectors [B, T, D] for float frames [B, T, F] with the mask [B, T]."""
        x = super().forward(frames)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            visible = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)
            x = x + norm(conv(visible.mT).mT).relu()
        return x


def _check_values(what: str, tokens: Tensor, size: int, in_step: bool) -> None:
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        refuse(f'a {what}', 'an integer', tokens)
    if torch.compiler.is_compiling() or not tokens.numel():
        return
    # Reading from a device costs more than the step.
    if in_step and tokens.device.type != 'cpu':
        return
    low, high = (int(value) for value in tokens.long().aminmax())
    if low < 0 or high >= size:
        raise ValueError(f'a {what} must be 0 to {size - 1}, got {low if low < 0 else high}')
