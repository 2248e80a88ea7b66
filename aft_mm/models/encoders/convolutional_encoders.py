"""Baseline encoders of speech: a TDNN, and torchaudio's Conformer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aft_mm.checks import check_int, check_probability, check_sizes, refuse
from aft_mm.layers import Resettable
from aft_mm.layers.grid import check_kernel
from aft_mm.openmmlab import BaseModule
from aft_mm.registry import MODELS

from .bi_lstm_encoder import check_features


@MODELS.register_module()
class TDNNEncoder(Resettable, BaseModule):
    """Time-delay network, ``[B, T, F] -> [B, T, D]``: dilated convolutions with batch norm.

    Padding is 0 before every convolution; batch norm in training includes it.

    Args:
        num_features: Features F of a frame.
        embed_dims: Channels D.
        kernel_size: Frames of every kernel, odd.
        dilations: Frames between the entries of a kernel, one per layer.
        drop_rate: Dropout probability after every layer.
        init_cfg: See mmengine's BaseModule.
    """

    def __init__(
        self,
        num_features: int,
        embed_dims: int = 128,
        kernel_size: int = 5,
        dilations: Sequence[int] = (1, 2, 4),
        drop_rate: float = 0.0,
        init_cfg: dict | list[dict] | None = None,
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


@MODELS.register_module()
class ConformerEncoder(Resettable, BaseModule):
    """torchaudio's Conformer (arXiv 2005.08100), ``[B, T, F] -> [B, T, D]``.

    Its convolutions read padding, so results depend slightly on the batch.

    Args:
        num_features: Features F of a frame.
        embed_dims: Channels D.
        num_layers: Number of blocks.
        num_heads: Attention heads, a divisor of D.
        kernel_size: Frames of the depthwise convolution, odd.
        drop_rate: Dropout probability.
        init_cfg: See mmengine's BaseModule.
    """

    def __init__(
        self,
        num_features: int,
        embed_dims: int = 96,
        num_layers: int = 2,
        num_heads: int = 4,
        kernel_size: int = 15,
        drop_rate: float = 0.0,
        init_cfg: dict | list[dict] | None = None,
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
        try:
            with torch.device('cpu'):  # the import creates tensors, which must not be meta
                from torchaudio.models import Conformer
        except ImportError as error:
            raise ValueError(
                'ConformerEncoder needs torchaudio, which pip install aft_mm[speech] installs'
            ) from error
        self.num_features, self.embed_dims = num_features, embed_dims
        self.projection = nn.Linear(num_features, embed_dims)
        self.conformer = Conformer(
            embed_dims, num_heads, 4 * embed_dims, num_layers, size, drop_rate
        )

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return hidden vectors [B, T, D] of features [B, T, F] with the mask [B, T]."""
        check_features(features, self.num_features)
        lengths = features.new_full((len(features),), features.shape[1]).long()
        lengths = lengths if mask is None else mask.sum(1)
        x = self.projection(features)
        x = x if mask is None else x.masked_fill(~mask.unsqueeze(-1), 0)
        return self.conformer(x, lengths)[0]
