from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import refuse
from aft_mm.layers import ConvFrameEmbedding
from aft_mm.registry import MODELS

from ..block_stack import BlockStack


class DecoderState(NamedTuple):
    """State of :class:`SequenceDecoder` between steps.

    position [B]: index of the token that the last hidden vector predicts.
    """

    blocks: list[Any]
    position: Tensor

    def hold(self, last: int) -> None:
        """Move sequences past token `last` back to it, in place.

        So a complete sequence stays inside the position table while others take steps.
        """
        self.position.clamp_(max=last)
        for block in self.blocks:
            block.position.clamp_(max=last + 1)


@MODELS.register_module()
class SequenceDecoder(BlockStack):
    """Autoregressive decoder: the output at t depends on the tokens before t only.

    ``hidden_t = norm(blocks(x))_t`` predicts token t, with ``x_0 = start + p_0`` and
    ``x_t = embedding(token_{t−1}) + p_t``. Arguments are those of :class:`BlockStack` but `causal`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, causal=True, **kwargs)
        if self.embedding is None:
            raise ValueError('embedding must be given for a decoder, got None')
        if isinstance(self.embedding, ConvFrameEmbedding):
            raise ValueError('embedding must not see later frames, got ConvFrameEmbedding')
        self.start_embedding = nn.Parameter(torch.empty(self.embed_dims))
        nn.init.trunc_normal_(self.start_embedding, std=0.02)

    def forward(
        self, tokens: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        """Return the hidden vectors [B, T, D] that predict the tokens.

        Args:
            tokens: int64 [B, T] or [B, T, C], or frames [B, T, F] for a FrameEmbedding.
            memory: Output [B, S, D] of an encoder.
            memory_mask: bool [B, S], True = keep.

        Raises:
            ValueError: A sequence beyond the position table, or a token outside the vocabulary.
        """
        length = tokens.shape[1]
        self.check_length(length)
        x = self._embed(tokens)[:, :length]
        if len(self.grid) > 1:
            # Mixers on a 2-d grid need the whole image.
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
        """Run prompts in one parallel pass, without gradient.

        Args:
            tokens: Prompts [B, L] or [B, L, C], shorter than the position table.
            lengths: Tokens of each prompt [B], 0 allowed; the rest is padding.
            memory, memory_mask: See :meth:`forward`.

        Returns:
            The hidden vector [B, D] that predicts token lengths[b], and the state for :meth:`step`.
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
        """Take one token per sequence and predict the next, without gradient.

        Args:
            token: The token at state.position, [B] or [B, C], or the frame [B, F].
            state: From :meth:`prefill` or the last step; it is overwritten.

        Returns:
            The hidden vector [B, D] that predicts the next token, and the next state.

        Raises:
            ValueError: The state has another number of sequences, or, on a CPU, one is too long; on
                a GPU the caller counts.
        """
        position = state.position + 1
        if len(token) != len(position):
            refuse('token', f'one for each of the {len(position)} sequences of the state', token)
        if position.device.type == 'cpu' and not torch.compiler.is_compiling():
            self.check_length(int(position.max()) + 1)
        x = self.embedding(token.unsqueeze(1), state.position).squeeze(1)
        x = self.add_positions(x, position)
        blocks = []
        for layer, block in zip(self.layers, state.blocks, strict=True):
            x, block = layer.step(x, block)
            blocks.append(block)
        return self.norm(x), DecoderState(blocks, position)

    def select_state(
        self, state: DecoderState, rows: Tensor, same_memory: bool = False
    ) -> DecoderState:
        """Return the state of the sequences rows [N]; `same_memory`: places keep their memory."""
        blocks = [
            layer.select_state(block, rows, same_memory)
            for layer, block in zip(self.layers, state.blocks, strict=True)
        ]
        return DecoderState(blocks, state.position[rows])

    def _embed(self, tokens: Tensor) -> Tensor:
        """Return the embedded start and tokens, [B, T + 1, D], at most the position table."""
        start = self.start_embedding.expand(len(tokens), 1, -1)
        x = torch.cat([start, self.embedding(tokens)], dim=1)
        return self.add_positions(x[:, : self.max_length])
