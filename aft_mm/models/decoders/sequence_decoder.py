"""The decoder of every sequence task."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.registry import MODELS

from ..block_stack import BlockStack


class DecoderState(NamedTuple):
    """What :class:`SequenceDecoder` keeps between steps: the states of its blocks.

    position [B]: index of the token that the last hidden vector predicts.
    """

    blocks: list[Any]
    position: Tensor

    def hold(self, last: int) -> None:
        """Set back to token `last` what is past it: a complete sequence steps along in its batch
        without leaving the position table; its outputs mean nothing.
        """
        self.position.clamp_(max=last)
        for block in self.blocks:
            block.position.clamp_(max=last + 1)


@MODELS.register_module()
class SequenceDecoder(BlockStack):
    """Autoregressive decoder: the output at t, [B, T, D], depends on the tokens before t only.

    ``hidden_t = norm(blocks(x))_t`` with ``x_0 = start + p_0`` and
    ``x_t = embedding(token_{t−1}) + p_t``, so that hidden[:, t] predicts token t: T tokens give T
    predictions.

    ``SequenceDecoder(256, 24, embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=256,
    num_kinds=3), token_mixer=dict(type='aft_mm.AFTLocal', window=256, rank=64), grid=(3072,))`` is
    a decoder of CIFAR-10 pictures.

    Args: see :class:`BlockStack`; any causal mixer serves, `causal` is set here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, causal=True, **kwargs)
        if self.embedding is None:
            raise ValueError('embedding must be given for a decoder, got None')
        self.start_embedding = nn.Parameter(torch.empty(self.embed_dims))
        nn.init.trunc_normal_(self.start_embedding, std=0.02)

    def forward(
        self, tokens: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        """tokens int64 [B, T] or [B, T, C] -> hidden [B, T, D].

        memory [B, S, D] and memory_mask [B, S], True = keep, come from an encoder. Raises
        ValueError for a sequence longer than the position table and for a token outside the
        vocabulary.
        """
        length = tokens.shape[1]
        self.check_length(length)
        x = self._embed(tokens)[:, :length]
        if len(self.grid) > 1:
            # A mixer on a picture takes the whole of it; later tokens change nothing before them.
            x = F.pad(x, (0, 0, 0, self.max_length - length))
        return self.run_blocks(x, None, memory, memory_mask)[:, :length]

    @torch.no_grad()
    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> tuple[Tensor, DecoderState]:
        """The prompts of a batch in one parallel pass, without gradient.

        tokens [B, L] or [B, L, C], of which the first lengths [B] count, 0 allowed. Gives the
        hidden [B, D] that predicts token lengths[b] of each sequence, and the state for
        :meth:`step`, which holds what every block makes of the memory. Raises ValueError as
        :meth:`forward`, which needs room for one token more.
        """
        self.check_length(tokens.shape[1] + 1)
        x = self._embed(tokens)
        blocks = []
        for layer in self.layers:
            x, state = layer.prefill(x, lengths + 1, memory, memory_mask)
            blocks.append(state)
        rows = torch.arange(len(x), device=x.device)
        hidden = self.norm(x[rows, lengths])
        return hidden, DecoderState(blocks, lengths.clone())

    @torch.no_grad()
    def step(self, token: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Token state.position, [B] or [B, C] -> the hidden [B, D] that predicts the one after it.

        Without gradient; `state` is used up. On a CPU it raises ValueError past the position table
        and for a token outside the vocabulary; elsewhere a look at either would wait for the device
        at every token, and an index outside a table is left to torch.
        """
        position = state.position + 1
        if position.device.type == 'cpu' and not torch.compiler.is_compiling():
            self.check_length(int(position.max()) + 1)
        x = self.embedding(token.unsqueeze(1), state.position).squeeze(1)
        x = self.drop(x + self.position_of(position))
        blocks = []
        for layer, block in zip(self.layers, state.blocks, strict=True):
            x, block = layer.step(x, block)
            blocks.append(block)
        return self.norm(x), DecoderState(blocks, position)

    def select_state(
        self, state: DecoderState, rows: Tensor, same_memory: bool = False
    ) -> DecoderState:
        """The state of the sequences rows [N] of its batch, in this order; `state` stays as it is.

        With `same_memory` each place of the batch goes on to read the memory that it reads.
        """
        blocks = [
            layer.select_state(block, rows, same_memory)
            for layer, block in zip(self.layers, state.blocks, strict=True)
        ]
        return DecoderState(blocks, state.position[rows])

    def _embed(self, tokens: Tensor) -> Tensor:
        """The start vector and the tokens, [B, T + 1, D], at the positions that the table has."""
        start = self.start_embedding.expand(len(tokens), 1, -1)
        x = torch.cat([start, self.embedding(tokens)], dim=1)
        return self.add_positions(x[:, : self.max_length])
