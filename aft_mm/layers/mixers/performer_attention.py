"""Performer's attention: linear attention over random features of the softmax kernel."""

import math
from typing import Any

import torch
from torch import Tensor

from aft_mm.checks import check_int
from aft_mm.ops.linear_terms import never_negative
from aft_mm.registry import MODELS

from ..grid import Grid
from .linear_attention import FeatureAttention

# Where exponents of key features are cut: e^±80 is normal in float32 and leaves room for sums. The
# upper end is more than 8 standard deviations of a feature away, for a key of any length.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -80.0, 40.0


@MODELS.register_module()
class PerformerAttention(FeatureAttention):
    """Linear attention over positive orthogonal random features (arXiv 2009.14794, FAVOR+).

    ``φ(x) = exp(ω x − |x|² / 2)`` of x = q or k over (D/h)^¼, rows ω orthogonal in blocks of D/h
    with the norms of Gaussian vectors, so that the mean of ``φ(q)·φ(k)`` is ``exp(q·k / √(D/h))``.
    Stabilised without a look at later tokens: queries over their largest feature, which cancels,
    and keys with their exponents cut to −80 … 40. The state of a step has (D + h)·m numbers.

    ω and the seed of later draws are buffers, made with torch's generator: they are saved with a
    checkpoint, and every process that starts from one seed has the same.

    Args:
        embed_dims: channels D.
        num_heads: h, a divisor of D.
        num_features: m per head; None for D/h · ln(D/h), rounded up, as the paper proposes.
        redraw: draw ω anew after so many training iterations; None keeps it.
        others: see :class:`TokenMixer`.
    """

    projection: Tensor
    seed: Tensor
    iterations: Tensor

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        num_features: int | None = None,
        redraw: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, num_heads, **kwargs)
        dims = embed_dims // num_heads
        if num_features is None:
            num_features = max(1, math.ceil(dims * math.log(dims)))
        for name, number in (('num_features', num_features), ('redraw', redraw)):
            if number is not None:
                check_int(name, number, 1)
        self.num_features, self.redraw = num_features, redraw
        self.feature_map = (self._query_features, self._key_features)
        # That of later draws.
        self.register_buffer('seed', torch.randint(2**32, ()))
        self.register_buffer('iterations', torch.tensor(0))
        self.register_buffer('projection', _draw(num_features, dims))
        # What the buffer holds, read from it once: a look would wait for a device.
        self._iterations: int | None = 0
        self._version_seen: int | None = None

    def _mix(self, query, key, value, grid: Grid, key_mask: Tensor | None) -> Tensor:
        if self.training and self.redraw is not None:
            self._count_iteration()
        return super()._mix(query, key, value, grid, key_mask)

    @torch.compiler.disable
    def _count_iteration(self) -> None:
        # Torch counts the writes to a tensor. A pass that is not the first since the last of them,
        # of accumulated gradients or a checkpointed block made anew, must see the same features.
        version = self.key.weight._version
        if version == self._version_seen:
            return
        self._version_seen = version
        before = int(self.iterations) if self._iterations is None else self._iterations
        self._iterations = before + 1
        self.iterations.fill_(self._iterations)
        if before and before % self.redraw == 0:
            generator = torch.Generator().manual_seed(int(self.seed) + before // self.redraw)
            drawn = _draw(*self.projection.shape, generator=generator, device='cpu')
            self.projection.copy_(drawn)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``ω x`` and x, scaled."""
        x = x * x.shape[-1] ** -0.25
        return x @ self.projection.to(x.dtype).T, x

    @never_negative
    def _query_features(self, query: Tensor) -> Tensor:
        exponent, _ = self._project(query)
        return (exponent - exponent.detach().amax(-1, keepdim=True)).exp()

    @never_negative
    def _key_features(self, key: Tensor) -> Tensor:
        exponent, key = self._project(key)
        exponent = exponent - key.square().sum(-1, keepdim=True) / 2
        return exponent.clamp(LOWEST_EXPONENT, HIGHEST_EXPONENT).exp()

    def _load_from_state_dict(self, *args) -> None:
        super()._load_from_state_dict(*args)
        self._iterations = None


def _draw(number: int, dims: int, **options: Any) -> Tensor:
    """ω [number, dims]: orthogonal in blocks of dims rows, with the norms of Gaussian vectors."""
    blocks = []
    for _ in range(-(-number // dims)):
        directions, upper = torch.linalg.qr(torch.randn(dims, dims, **options))
        # Without the signs of the diagonal the rows prefer a side, and so would the estimate.
        directions = (directions * upper.diagonal().sign()).T
        blocks.append(directions * torch.randn(dims, dims, **options).norm(dim=1, keepdim=True))
    return torch.cat(blocks)[:number]
