"""The encoder of source tokens."""

from typing import Any

from torch import Tensor

from aft_mm.registry import MODELS

from ..block_stack import BlockStack


@MODELS.register_module()
class SequenceEncoder(BlockStack):
    """Tokens or frames to vectors, ``[B, S] -> [B, S, D]``, every token sees all.

    The memory of a decoder, or what :class:`CTCHead` reads.

    Args: see :class:`BlockStack`; the mixer is not causal, which is set here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, causal=False, **kwargs)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """tokens int64 [B, S] or [B, S, C], or frames [B, S, F], as the embedding takes them; mask
        bool [B, S], True = keep; memory [B, S, D].

        Raises ValueError for a sequence longer than the position table and for a token outside the
        vocabulary.
        """
        self.check_length(tokens.shape[1])
        return self.run_blocks(self.add_positions(self.embedding(tokens)), mask)
