from typing import Any

from torch import Tensor

from aft_mm import ops
from aft_mm.ops.checks import check_key_function
from aft_mm.ops.gates import Gate
from aft_mm.registry import MODELS

from ..grid import Grid
from .base import OpMixer


@MODELS.register_module()
class AFTSimple(OpMixer):
    """AFT without position bias, W = 1 (arXiv 2105.14103, eq. 5).

    Args:
        key_function: 'softmax', or 'relu' or 'relu2' without normalisation, see
            :func:`aft_mm.ops.aft_simple`.
        gate: See :class:`AFTMixer`; by default 'sigmoid', with 'relu2' always 'relu'.
    """

    op = 'aft_simple'
    takes_memory = True
    takes_prefix_tokens = True

    def __init__(
        self,
        embed_dims: int,
        key_function: str = 'softmax',
        *,
        gate: Gate | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if gate is None:
            gate = 'relu' if key_function == 'relu2' else 'sigmoid'
        check_key_function(key_function, gate)
        super().__init__(embed_dims, gate=gate, **kwargs)
        self.key_function = key_function
        # Without a query the number of targets is unknown.
        self.takes_memory = self.query is not None

    def _op_options(self, grid: Grid | None) -> dict[str, Any]:
        return dict(key_function=self.key_function)

    def _prefill(self, state: Any, key: Tensor, value: Tensor, lengths: Tensor) -> Any:
        return ops.prefill(state, key, value, lengths, key_function=self.key_function)
