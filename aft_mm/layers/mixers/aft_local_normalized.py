"""AFT-local-learned of the ICLR submission."""

from collections.abc import Sequence
from typing import Any

from aft_mm import ops
from aft_mm.registry import MODELS

from .aft_local import AFTLocal


@MODELS.register_module()
class AFTLocalNormalized(AFTLocal):
    """AFT with local weights that have a softmax of their own (ICLR submission, eq. 8).

    ``y_t = g(q_t) ⊙ Σ_t' softmax(w_t)[t'] softmax(k)[t'] ⊙ v_t'`` over the window.

    Args:
        embed_dims: channels D.
        window: as in :class:`AFTLocal`, 1 or larger.
        rank: d' of u and v, or None, as in :class:`AFTLocal`.
        others: see :class:`AFTMixer`; grid, of 1 or 2 dimensions, is required.
    """

    op = staticmethod(ops.aft_local_normalized)
    op_init_state = staticmethod(ops.aft_local_normalized_init_state)
    op_step = staticmethod(ops.aft_local_normalized_step)

    def __init__(
        self, embed_dims: int, window: int | Sequence[int], rank: int | None = 128, **kwargs: Any
    ) -> None:
        super().__init__(embed_dims, window, rank, **kwargs)
        if 0 in ((window,) if isinstance(window, int) else window):
            raise ValueError(f'window must be 1 or larger for AFTLocalNormalized, got {window}')
