"""AFT-local-learned of the ICLR submission."""

from aft_mm import ops
from aft_mm.registry import MODELS

from .aft_local import AFTLocal


@MODELS.register_module()
class AFTLocalLearned(AFTLocal):
    """AFT with local weights that have a softmax of their own (ICLR submission, eq. 8).

    ``y_t = g(q_t) ⊙ Σ_t' softmax(w_t)[t'] softmax(k)[t'] ⊙ v_t'`` over all visible tokens, w
    being 0 outside the window.

    Args:
        embed_dims: channels D.
        window: as in :class:`AFTLocal`; 0 gives every visible token the same weight.
        rank, init_std: of u and v, or of a free w, as in :class:`AFTLocal`.
        others: see :class:`AFTMixer`; grid, of 1 or 2 dimensions, is required.
    """

    _version = 2  # 1 had no weights outside the window
    op = staticmethod(ops.aft_local_learned)
    op_init_state = staticmethod(ops.aft_local_learned_init_state)
    op_step = staticmethod(ops.aft_local_learned_step)
