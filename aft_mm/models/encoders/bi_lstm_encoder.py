from typing import Any

from torch import Tensor, nn

from aft_mm.checks import check_int, check_probability, refuse
from aft_mm.layers import Resettable
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
