from typing import Any

from torch import Tensor

from aft_mm.layers import ConvFrameEmbedding
from aft_mm.layers.mixers.base import hide_tokens
from aft_mm.registry import MODELS

from ..block_stack import BlockStack


@MODELS.register_module()
class SequenceEncoder(BlockStack):
    """Encoder of tokens or frames, ``[B, S] -> [B, S, D]``; every token sees all others.

    Arguments are those of :class:`BlockStack` but `causal`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, causal=False, **kwargs)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, **pairs: Tensor | None) -> Tensor:
        """Return the encoded vectors [B, S, D].

        Args:
            tokens: Input of the embedding, such as int64 [B, S] or frames [B, S, F]. Hidden frames
                may hold NaN.
            mask: bool [B, S], True = keep.
            **pairs: position_bias and pair_mask, see :meth:`TokenMixer.forward`.

        Raises:
            ValueError: A sequence beyond the position table, or a token outside the vocabulary.
        """
        self.check_length(tokens.shape[1])
        if mask is not None and tokens.is_floating_point():
            tokens = hide_tokens(tokens, mask)
        masked = mask is not None and isinstance(self.embedding, ConvFrameEmbedding)
        x = self.embedding(tokens, mask) if masked else self.embedding(tokens)
        return self.run_blocks(self.add_positions(x), mask, **pairs)
