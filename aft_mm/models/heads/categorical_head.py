from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aft_mm.checks import check_flag, check_int, check_probability
from aft_mm.layers import Resettable, TokenEmbedding
from aft_mm.registry import MODELS

from ..decoding.generation import sample_categorical


@MODELS.register_module()
class CategoricalHead(Resettable):
    """Categorical distribution over V values, ``softmax(W h + b)``.

    Args:
        num_classes: V.
        tied: Use the table of the decoder's embedding as W, see :meth:`tie`.
        label_smoothing: ε of the loss ``(1 − ε) (−log p(target)) + ε mean_v(−log p(v))`` (arXiv
            1512.00567, §7), not of likelihoods.
    """

    dims_per_token = 1
    token_shape = ()

    def __init__(
        self, embed_dims: int, num_classes: int, tied: bool = False, label_smoothing: float = 0.0
    ) -> None:
        super().__init__()
        check_int('embed_dims', embed_dims, 1)
        check_int('num_classes', num_classes, 1)
        check_flag('tied', tied)
        check_probability('label_smoothing', label_smoothing)
        self.embed_dims = embed_dims
        self.num_values = num_classes
        self.shape = (num_classes, embed_dims)
        self.tied = tied
        self.label_smoothing = label_smoothing
        self.bias = nn.Parameter(torch.zeros(num_classes))
        # A tuple is no submodule.
        self._embedding: tuple[TokenEmbedding, ...] = ()
        self.register_parameter('weight', None)
        if not tied:
            self.weight = nn.Parameter(torch.empty(self.shape))
            nn.init.trunc_normal_(self.weight, std=0.02)

    def tie(self, embedding: nn.Module) -> None:
        """Use the table of `embedding`, a TokenEmbedding [V, D], as W."""
        if not isinstance(embedding, TokenEmbedding) or embedding.weight.shape != self.shape:
            shape = list(embedding.weight.shape) if isinstance(embedding, TokenEmbedding) else ''
            raise ValueError(
                f'embedding of a tied head must be a TokenEmbedding {list(self.shape)}, got a '
                f'{type(embedding).__name__} {shape}'.rstrip()
            )
        self._embedding = (embedding,)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] for hidden [..., D]."""
        if self.tied and not self._embedding:
            raise ValueError('tie(embedding) must be called before a tied head is used')
        weight = self._embedding[0].weight if self.tied else self.weight
        return F.linear(hidden, weight, self.bias)

    def nats(self, hidden: Tensor, targets: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``−log p(target)`` [...] in `dtype` of hidden [..., D] and integer targets [...].

        Raises:
            ValueError: Targets of another shape, or not of integers.
        """
        return self._cross_entropy(hidden, targets, dtype, 0.0)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return :meth:`nats` with label smoothing, [...]."""
        return self._cross_entropy(hidden, targets, torch.float32, self.label_smoothing)

    def _cross_entropy(
        self, hidden: Tensor, targets: Tensor, dtype: torch.dtype, smoothing: float
    ) -> Tensor:
        if targets.shape != hidden.shape[:-1] or targets.is_floating_point():
            raise ValueError(
                f'targets must be integers {list(hidden.shape[:-1])}, got {targets.dtype} '
                f'{list(targets.shape)}'
            )
        logits = self.logits(hidden).to(dtype).reshape(-1, self.num_values)
        targets_1d = targets.flatten().long()
        nats = F.cross_entropy(logits, targets_1d, reduction='none', label_smoothing=smoothing)
        return nats.view_as(targets)

    def most_likely(self, hidden: Tensor) -> Tensor:
        """Return the most probable value, int64 [...], for hidden [..., D]."""
        return self.logits(hidden).argmax(-1)

    def sample(self, hidden: Tensor, **options: Any) -> Tensor:
        """Sample a value per row of hidden [B, D], int64 [B], see :func:`sample_categorical`."""
        return sample_categorical(self.logits(hidden), **options)
