from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from aft_mm import ops
from aft_mm.registry import MODELS

from ..grid import Grid
from ..position_bias import decreasing_slopes
from .base import OpMixer


@MODELS.register_module()
class AFTDecay(OpMixer):
    """AFT-simple whose keys lose weight by ``e^−λ`` per token, ``w = −λ |t − t'|``.

    Each channel learns its λ > 0, which starts at ``2^(−8 i / D)`` for the channels i = 1 … D. It
    is no variant of the papers.
    """

    op = 'aft_decay'

    def __init__(self, embed_dims: int, **kwargs: Any) -> None:
        super().__init__(embed_dims, **kwargs)
        self.log_decay = nn.Parameter(decreasing_slopes(embed_dims).log())

    def _op_options(self, grid: Grid | None) -> dict[str, Any]:
        return {}

    def _op_bias(self, grid: Grid | None = None) -> Sequence[Tensor | None]:
        return (self.log_decay.exp(),)

    def _prefill(self, state: Any, key: Tensor, value: Tensor, lengths: Tensor) -> Any:
        return ops.prefill(state, key, value, lengths, decay=self.log_decay.exp())
