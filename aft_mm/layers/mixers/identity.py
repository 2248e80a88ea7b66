from typing import Any

from torch import Tensor

from aft_mm import ops
from aft_mm.registry import MODELS

from ..grid import Grid
from .depthwise_conv import KernelMixer


@MODELS.register_module()
class Identity(KernelMixer):
    """No mixing, ``y = proj(g(query(x)) ⊙ value(x))``, the lower bound of comparisons."""

    normalized = True

    def __init__(self, embed_dims: int, **kwargs: Any) -> None:
        super().__init__(embed_dims, 1, **kwargs)

    def _mix(
        self, query: Tensor | None, key: Tensor, value: Tensor, grid: Grid, key_mask: Tensor | None
    ) -> Tensor:
        value = value if key_mask is None else value.masked_fill(~key_mask.unsqueeze(-1), 0)
        return ops.apply_gate(query, value, self.gate)
