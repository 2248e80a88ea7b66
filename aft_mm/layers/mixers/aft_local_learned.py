"""AFT-local-learned."""

from aft_mm.registry import MODELS

from .aft_local import AFTLocal


@MODELS.register_module()
class AFTLocalLearned(AFTLocal):
    """AFT-local with a separate softmax over the position weights (ICLR submission, eq. 8).

    ``y_t = g(q_t) ⊙ Σ_t' softmax(w_t)[t'] softmax(k)[t'] ⊙ v_t'`` over all visible tokens, with w =
    0 outside the window. Arguments are those of :class:`AFTLocal`.
    """

    normalized = False
    op = 'aft_local_learned'
