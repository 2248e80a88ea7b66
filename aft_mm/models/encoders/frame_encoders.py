"""Encoders of frames for CTC that have no token mixer: recurrent, convolutional and Conformer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aft_mm.checks import check_int, check_probability, check_sizes, refuse
from aft_mm.layers import Resettable
from aft_mm.layers.grid import check_kernel
from aft_mm.layers.mixers.lstm import run_lstm
from aft_mm.openmmlab import BaseModule
from aft_mm.registry import MODELS


def check_features(features: Tensor, num_features: int) -> None:
    if features.dim() != 3 or features.shape[-1] != num_features:
        refuse('features', f'a tensor [B, T, {num_features}]', features)


@MODELS.register_module()
class BiLSTMEncoder(Resettable, BaseModule):
    """Bidirectional LSTM, ``[B, T, F] -> [B, T, 2·H]`` (arXiv 2006.16236, §4.3). Skips padding.

    Args:
        hidden_dims: Channels H of each direction.
        drop_rate: Dropout probability between layers.
    """

    def __init__(
        self,
        num_features: int,
        hidden_dims: int = 320,
        num_layers: int = 3,
        drop_rate: float = 0.0,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        check_int('num_features', num_features, 1)
        check_int('hidden_dims', hidden_dims, 1)
        check_int('num_layers', num_layers, 1)
        check_probability('drop_rate', drop_rate)
        self.embed_dims = 2 * hidden_dims
        self.lstm = nn.LSTM(
            num_features,
            hidden_dims,
            num_layers,
            batch_first=True,
            bidirectional=True,
            dropout=drop_rate if num_layers > 1 else 0.0,
        )

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return hidden vectors [B, T, 2·H] of features [B, T, F] with the mask [B, T]."""
        check_features(features, self.lstm.input_size)
        return run_lstm(self.lstm, features, None if mask is None else mask.sum(1))[0]


@MODELS.register_module()
class TDNNEncoder(Resettable, BaseModule):
    """Time-delay network, ``[B, T, F] -> [B, T, D]``: dilated convolutions with batch norm.

    Padding is 0 before every convolution.

    Args:
        kernel_size: Frames of every kernel, odd.
        dilations: Frames between the entries of a kernel, one per layer.
        drop_rate: Dropout probability after every layer.
    """

    def __init__(
        self,
        num_features: int,
        embed_dims: int = 128,
        kernel_size: int = 5,
        dilations: Sequence[int] = (1, 2, 4),
        drop_rate: float = 0.0,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        check_int('num_features', num_features, 1)
        check_int('embed_dims', embed_dims, 1)
        check_sizes('dilations', dilations, tuple(range(1, 33)))
        check_probability('drop_rate', drop_rate)
        (size,) = check_kernel(kernel_size, (1,))
        self.num_features, self.embed_dims = num_features, embed_dims
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(
                    num_features if n == 0 else embed_dims,
                    embed_dims,
                    size,
                    padding=size // 2 * dilation,
                    dilation=dilation,
                ),
                nn.BatchNorm1d(embed_dims),
                nn.ReLU(),
                nn.Dropout(drop_rate),
            )
            for n, dilation in enumerate(dilations)
        )

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return hidden vectors [B, T, D] of features [B, T, F] with the mask [B, T]."""
        check_features(features, self.num_features)
        x = features.mT
        for layer in self.layers:
            x = layer(x if mask is None else x.masked_fill(~mask.unsqueeze(1), 0))
        return x.mT


class _FeedForward(nn.Module):
    def __init__(self, dims: int, drop_rate: float) -> None:
        super().__init__()
        self.sequential = nn.Sequential(
            nn.LayerNorm(dims),
            nn.Linear(dims, 4 * dims),
            nn.SiLU(),
            nn.Dropout(drop_rate),
            nn.Linear(4 * dims, dims),
            nn.Dropout(drop_rate),
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.sequential(x)
        return output


class _Convolution(nn.Module):
    def __init__(self, dims: int, kernel_size: int, drop_rate: float) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(dims)
        self.sequential = nn.Sequential(
            nn.Conv1d(dims, 2 * dims, 1),
            nn.GLU(1),
            nn.Conv1d(dims, dims, kernel_size, padding='same', groups=dims),
            nn.BatchNorm1d(dims),
            nn.SiLU(),
            nn.Conv1d(dims, dims, 1),
            nn.Dropout(drop_rate),
        )

    def forward(self, x: Tensor) -> Tensor:
        columns: Tensor = self.sequential(self.layer_norm(x).mT)
        return columns.mT


class _ConformerLayer(nn.Module):
    def __init__(self, dims: int, num_heads: int, kernel_size: int, drop_rate: float) -> None:
        super().__init__()
        # Checkpoints have these names, and the order decides what a seed initialises.
        self.ffn1 = _FeedForward(dims, drop_rate)
        self.self_attn_layer_norm = nn.LayerNorm(dims)
        self.self_attn = nn.MultiheadAttention(dims, num_heads, dropout=drop_rate, batch_first=True)
        self.self_attn_dropout = nn.Dropout(drop_rate)
        self.conv_module = _Convolution(dims, kernel_size, drop_rate)
        self.ffn2 = _FeedForward(dims, drop_rate)
        self.final_layer_norm = nn.LayerNorm(dims)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x + 0.5 * self.ffn1(x)
        y = self.self_attn_layer_norm(x)
        y, _ = self.self_attn(y, y, y, key_padding_mask=padding, need_weights=False)
        x = x + self.self_attn_dropout(y)
        x = x + self.conv_module(x)
        x = x + 0.5 * self.ffn2(x)
        normed: Tensor = self.final_layer_norm(x)
        return normed


@MODELS.register_module()
class ConformerEncoder(Resettable, BaseModule):
    """Conformer (arXiv 2005.08100), ``[B, T, F] -> [B, T, D]``, without relative positions.

    Its convolutions read padding, so results depend slightly on the batch.

    Args:
        kernel_size: Frames of the depthwise convolution, odd.
    """

    def __init__(
        self,
        num_features: int,
        embed_dims: int = 96,
        num_layers: int = 2,
        num_heads: int = 4,
        kernel_size: int = 15,
        drop_rate: float = 0.0,
        init_cfg: dict[str, Any] | list[dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(init_cfg)
        check_int('num_features', num_features, 1)
        check_int('embed_dims', embed_dims, 1)
        check_int('num_layers', num_layers, 1)
        check_int('num_heads', num_heads, 1)
        if embed_dims % num_heads:
            refuse('num_heads', f'a divisor of embed_dims, {embed_dims}', num_heads)
        check_probability('drop_rate', drop_rate)
        (size,) = check_kernel(kernel_size, (1,))
        self.num_features, self.embed_dims = num_features, embed_dims
        self.projection = nn.Linear(num_features, embed_dims)
        layers = nn.ModuleList(
            _ConformerLayer(embed_dims, num_heads, size, drop_rate) for _ in range(num_layers)
        )
        self.conformer = nn.ModuleDict(dict(conformer_layers=layers))

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return hidden vectors [B, T, D] of features [B, T, F] with the mask [B, T]."""
        check_features(features, self.num_features)
        if mask is None:
            mask = features.new_ones(features.shape[:2], dtype=torch.bool)
        x: Tensor = self.projection(features).masked_fill(~mask.unsqueeze(-1), 0)
        for layer in self.conformer['conformer_layers'].children():
            x = layer(x, ~mask)
        return x
