from aft_mm.registry import MODELS

from .aft_local import AFTLocal


@MODELS.register_module()
class AFTLocalLearned(AFTLocal):
    """AFT-local with a separate softmax over the position weights (ICLR submission, eq. 8).

    See :func:`aft_mm.ops.aft_local_learned`; arguments are those of :class:`AFTLocal`.
    """

    normalized = False
    op = 'aft_local_learned'
