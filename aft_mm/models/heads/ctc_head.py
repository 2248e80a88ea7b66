from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import check_int
from aft_mm.layers import Resettable
from aft_mm.registry import MODELS

from ..decoding.ctc import BLANK


@MODELS.register_module()
class CTCHead(Resettable):
    """CTC (Graves et al. 2006), ``softmax(W h + b)`` per frame over the blank, 0, and V − 1 units.

    Args:
        num_classes: V, the blank included.
    """

    def __init__(self, embed_dims: int, num_classes: int) -> None:
        super().__init__()
        check_int('embed_dims', embed_dims, 1)
        check_int('num_classes', num_classes, 2)
        self.embed_dims = embed_dims
        self.num_classes = num_classes
        self.proj = nn.Linear(embed_dims, num_classes)
        nn.init.trunc_normal_(self.proj.weight, std=0.02)
        nn.init.zeros_(self.proj.bias)

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return log probabilities [B, T, V], at least float32, for hidden [B, T, D]."""
        logits: Tensor = self.proj(hidden)
        return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def nats(
        self, log_probs: Tensor, lengths: Sequence[int], targets: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return ``−log p(target)`` of each utterance, [B].

        Args:
            log_probs: [B, T, V].
            lengths: Number of frames of each utterance.
            targets: Units of each utterance, 1 to V − 1.

        Raises:
            ValueError: A unit is out of range, or an utterance has too few frames.
        """
        for length, target in zip(lengths, targets, strict=True):
            repeats = sum(a == b for a, b in zip(target, target[1:], strict=False))
            if len(target) + repeats > length:
                raise ValueError(
                    f'an utterance of {len(target)} units, {repeats} of them repeated, must have '
                    f'{len(target) + repeats} frames or more, got {length}'
                )
            if any(not 0 < unit < self.num_classes for unit in target):
                raise ValueError(
                    f'units must be 1 to {self.num_classes - 1}, got {min(target)} to {max(target)}'
                )
        device = log_probs.device
        return F.ctc_loss(
            log_probs.transpose(0, 1),
            torch.tensor([unit for target in targets for unit in target], device=device),
            torch.tensor(list(lengths), device=device),
            torch.tensor([len(target) for target in targets], device=device),
            blank=BLANK,
            reduction='none',
        )
