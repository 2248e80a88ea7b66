"""AFT-full."""

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from aft_mm import ops
from aft_mm.registry import MODELS

from ..grid import Grid
from ..position_bias import FactorizedPositionBias, FreePositionBias
from .base import AFTMixer


@dataclass
class AFTFullState:
    """What :class:`AFTFull` keeps between steps: the op's state and w [T, T], computed once."""

    mixing: Any
    bias: Tensor

    @property
    def position(self) -> Tensor:
        """Index of the next token of each sequence, [B]."""
        return self.mixing.position


@MODELS.register_module()
class AFTFull(AFTMixer):
    """AFT with a dense position bias, ``w = u vᵀ`` or a free matrix (arXiv 2105.14103, eq. 2, 7).

    A sequence may be shorter than the constructor's grid, a picture may have another grid: the bias
    is cropped or interpolated. The state of a step is O(T·D).

    Args:
        embed_dims: channels D.
        rank: d' of u and v; None for the free matrix.
        others: see :class:`AFTMixer`; grid is required.
    """

    takes_memory = True
    takes_prefix_tokens = True

    def __init__(self, embed_dims: int, rank: int | None = 128, **kwargs: Any) -> None:
        super().__init__(embed_dims, **kwargs)
        if self.grid is None:
            raise ValueError('grid must be given for AFTFull, whose bias has its size, got None')
        self.pos_bias: FactorizedPositionBias | FreePositionBias
        if rank is None:
            self.pos_bias = FreePositionBias(self.grid, self.num_prefix_tokens)
        else:
            self.pos_bias = FactorizedPositionBias(self.grid, rank, self.num_prefix_tokens)

    def position_bias(self) -> Tensor:
        """w [1, T, T], 0 for later tokens if causal."""
        bias = self.pos_bias()
        return (bias.tril() if self.causal else bias).unsqueeze(0)

    def _mix(self, query, key, value, grid: Grid, key_mask: Tensor | None) -> Tensor:
        # A memory may have a length of its own.
        same = key.shape[1] == self.num_prefix_tokens + prod(grid)
        bias = self.pos_bias(grid, grid if same else self._resolve_grid(key.shape[1]))
        return ops.aft_full(
            query, key, value, bias, causal=self.causal, key_mask=key_mask, gate=self.gate
        )

    def _init_state(self, batch_size: int) -> AFTFullState:
        bias = self.pos_bias()
        state = ops.aft_full_init_state(
            batch_size, self.embed_dims, len(bias), **self._state_options
        )
        return AFTFullState(state, bias)

    def _prefill(self, state: AFTFullState, key, value, lengths: Tensor) -> AFTFullState:
        return AFTFullState(ops.prefill(state.mixing, key, value, lengths), state.bias)

    def _mix_step(self, query, key, value, state: AFTFullState) -> tuple[Tensor, AFTFullState]:
        mixed, mixing = ops.aft_full_step(
            state.mixing, query, key, value, state.bias, gate=self.gate
        )
        return mixed, AFTFullState(mixing, state.bias)
