import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aft_mm.checks import check_int
from aft_mm.ops.linear_terms import never_negative
from aft_mm.registry import MODELS

from ..grid import Grid
from .linear_attention import FeatureAttention

# Exponents of key features are clamped; e^−80 is normal in float32, e^40 leaves room for sums.
LOWEST_EXPONENT, HIGHEST_EXPONENT = -80.0, 40.0


@MODELS.register_module()
class PerformerAttention(FeatureAttention):
    """Linear attention over positive orthogonal random features (arXiv 2009.14794, FAVOR+).

    ``φ(x) = exp(ω x − |x|² / 2)`` for x = q or k divided by (D/h)^¼, with the mean of ``φ(q)·φ(k)``
    equal to ``exp(q·k / √(D/h))``. Rows of ω are orthogonal in blocks of D/h.

    Args:
        num_heads: h, a divisor of D.
        num_features: m per head; None for the paper's D/h · ln(D/h), rounded up.
        redraw: Training iterations after which ω is sampled again; None for never.
    """

    example = dict(num_heads=3, num_features=10)

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
        self.register_buffer('seed', torch.randint(2**32, ()))
        self.register_buffer('iterations', torch.tensor(0))
        self.register_buffer('projection', sample_projection(num_features, dims))
        # Reading the buffer would synchronise.
        self._iterations: int | None = 0
        self._counted_version: int | None = None
        if redraw is not None:
            _exclude_count_from_graphs()

    def _mix(
        self, query: Tensor, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        if self.training and self.redraw is not None:
            self._count_iteration(self.redraw)
        return super()._mix(query, key, value, grid, key_mask)

    def _count_iteration(self, redraw: int) -> None:
        # Until the optimizer's step all passes must use the same features.
        version = self.key.weight._version
        if version == self._counted_version:
            return
        self._counted_version = version
        before = int(self.iterations) if self._iterations is None else self._iterations
        self._iterations = before + 1
        self.iterations.fill_(self._iterations)
        if before and before % redraw == 0:
            generator = torch.Generator().manual_seed(int(self.seed) + before // redraw)
            number, dims = self.projection.shape
            self.projection.copy_(sample_projection(number, dims, generator, 'cpu'))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``ω x`` and x, both for the scaled x."""
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

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._iterations = None


@cache
def _exclude_count_from_graphs() -> None:
    # As a decorator it would import the compiler, which takes seconds.
    cls: Any = PerformerAttention
    cls._count_iteration = torch.compiler.disable(cls._count_iteration)


def sample_projection(
    number: int, dims: int, generator: torch.Generator | None = None, device: str | None = None
) -> Tensor:
    """Return ω [number, dims], rows orthogonal in blocks, with norms of Gaussian vectors."""
    options: dict[str, Any] = dict(generator=generator, device=device)
    blocks = []
    for _ in range(-(-number // dims)):
        directions, upper = torch.linalg.qr(torch.randn(dims, dims, **options))
        # Without these signs the estimate would be biased.
        directions = (directions * upper.diagonal().sign()).T
        blocks.append(directions * torch.randn(dims, dims, **options).norm(dim=1, keepdim=True))
    return torch.cat(blocks)[:number]
