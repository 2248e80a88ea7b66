from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aft_mm.ops.gates import gate_values
from aft_mm.registry import MODELS

from ..grid import Grid
from .aft_conv import AFTConv
from .base import TokenMixer


@MODELS.register_module()
class AFTConvSigned(AFTConv):
    """Difference of two AFT-conv with the same keys and values, ``g(q) ⊙ (aft(w⁺) − aft(w⁻))``.

    The weights of AFT-conv are positive and sum to one. Those of a difference have both signs and
    sum to zero, as those of an edge filter. Not in the papers; each term is eq. 6 and 8 of arXiv
    2105.14103. `pos_bias` has 2·h kernels, w⁺ of all heads and then w⁻; there is no
    :meth:`position_bias`. As both start at w = 0, the output starts at the bias of `proj`.

    Args:
        init_peak: That of w⁺; w⁻ starts at 0.
        embed_dims, num_heads, kernel_size: See :class:`AFTConv`.
        **kwargs: See :class:`AFTConv`.
    """

    normalized = False
    kernels_per_head = 2

    def __init__(
        self, embed_dims: int, num_heads: int, kernel_size: int | Sequence[int], **kwargs: Any
    ) -> None:
        super().__init__(embed_dims, num_heads, kernel_size, **kwargs)
        # A bias of the value cancels, as the weights sum to zero.
        self.value = nn.Linear(embed_dims, embed_dims, bias=False)

    # Without the joined projection of AFTConv, which has one value per channel.
    _project_and_mix = TokenMixer._project_and_mix

    def position_bias(self) -> None:
        return None

    def _conv_options(self, grid: Grid, key_mask: Tensor | None) -> dict[str, Any]:
        return dict(super()._conv_options(grid, key_mask), gate='none')

    def _mix(
        self, query: Tensor | None, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        pairs = super()._mix(None, _twice(key), _twice(value), grid, key_mask)
        return self._subtract(query, pairs).to(value.dtype)

    def _prefill(self, state: Any, key: Tensor, value: Tensor, lengths: Tensor) -> Any:
        return super()._prefill(state, _twice(key), _twice(value), lengths)

    def _mix_step(
        self, query: Tensor | None, key: Tensor, value: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        pairs, state = super()._mix_step(None, _twice(key), _twice(value), state)
        return self._subtract(query, pairs).to(value.dtype), state

    def _subtract(self, query: Tensor | None, pairs: Tensor) -> Tensor:
        positive, negative = pairs.chunk(2, -1)
        difference = positive - negative
        return difference if query is None else gate_values(query, self.gate) * difference


def _twice(x: Tensor) -> Tensor:
    # In half precision, the difference of two close averages would be their rounding errors.
    wide = x if x.dtype == torch.float64 else x.float()
    return torch.cat((wide, wide), -1)
