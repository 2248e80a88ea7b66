from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from aft_mm.checks import refuse
from aft_mm.ops.tracing import no_autocast
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import TokenMixer


class LSTMState(NamedTuple):
    """Hidden and cell vectors after the last token [B, D]; index of the next token [B]."""

    hidden: Tensor
    cell: Tensor
    position: Tensor


@MODELS.register_module()
class LSTM(TokenMixer):
    """One LSTM layer, ``y = proj(LSTM(x))``, the recurrent baseline.

    A causal mixer has D hidden channels, otherwise two directions have D / 2 each. Hidden tokens
    are skipped.

    Args:
        embed_dims: Channels D, even unless causal.
        **kwargs: See :class:`TokenMixer`.
    """

    normalized = False
    state_type = LSTMState

    def __init__(self, embed_dims: int, **kwargs: Any) -> None:
        super().__init__(embed_dims, **kwargs)
        if not self.causal and embed_dims % 2:
            refuse('embed_dims', 'even for an LSTM with two directions', embed_dims)
        bias = self.value.bias is not None
        self.query, self.key, self.value = None, nn.Identity(), nn.Identity()
        size = embed_dims if self.causal else embed_dims // 2
        self.lstm = nn.LSTM(
            embed_dims, size, batch_first=True, bidirectional=not self.causal, bias=bias
        )

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        if key_mask is None:
            return run_lstm(self.lstm, value)[0]
        # Visible tokens move to the front. A hidden token gets the output of the one before it.
        order = key_mask.logical_not().byte().argsort(dim=1, stable=True)
        front = value.gather(1, order.unsqueeze(-1).expand_as(value))
        mixed, _ = run_lstm(self.lstm, front, key_mask.sum(1))
        index = key_mask.cumsum(1) - 1
        mixed = mixed.gather(1, index.clamp_min(0).unsqueeze(-1).expand_as(value))
        visible = index >= 0 if self.causal else key_mask.any(1, keepdim=True)
        return mixed.masked_fill(~visible.unsqueeze(-1), 0)

    def _init_state(self, batch_size: int) -> LSTMState:
        hidden, cell = torch.zeros(2, batch_size, self.embed_dims, **self._state_options)
        position = torch.zeros(batch_size, dtype=torch.int64, device=self._device)
        return LSTMState(hidden, cell, position)

    def _prefill(self, state: LSTMState, key: Tensor, value: Tensor, lengths: Tensor) -> LSTMState:
        _, last = run_lstm(self.lstm, value, lengths)
        empty = (lengths == 0).unsqueeze(-1)
        hidden, cell = (x[0].masked_fill(empty, 0) for x in last)
        return LSTMState(hidden, cell, lengths.to(torch.int64))

    def _mix_step(
        self, query: Tensor, key: Tensor, value: Tensor, state: LSTMState
    ) -> tuple[Tensor, LSTMState]:
        weights = self.lstm.all_weights[0]
        with no_autocast(value):
            value = value.to(weights[0].dtype)
            before = [x.to(value.dtype) for x in (state.hidden, state.cell)]
            hidden, cell = torch.lstm_cell(value, before, *weights)
        return hidden, LSTMState(hidden, cell, state.position + 1)


def run_lstm(
    lstm: nn.LSTM, x: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the outputs [B, T, ·] of the first tokens of each sequence, and the state after them."""
    weight: Any = lstm.weight_ih_l0
    x = x.to(weight.dtype)
    # oneDNN refuses bfloat16 autocast of an LSTM on processors without bfloat16.
    with no_autocast(weight):
        if lengths is None or not len(x):  # a packed sequence must not be empty
            result: tuple[Tensor, tuple[Tensor, Tensor]] = lstm(x)
            return result
        options: dict[str, Any] = dict(batch_first=True)
        # An empty sequence is not allowed; its results are not used.
        at_least_one = lengths.clamp_min(1).cpu()
        packed = pack_padded_sequence(x, at_least_one, enforce_sorted=False, **options)
        mixed, state = lstm(packed)
    return pad_packed_sequence(mixed, total_length=x.shape[1], **options)[0], state
