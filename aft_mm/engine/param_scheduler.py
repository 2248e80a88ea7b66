"""How the learning rate goes down."""

import math
from typing import Any

from mmengine.optim import ExponentialLR

from aft_mm.checks import check_int
from aft_mm.registry import PARAM_SCHEDULERS


@PARAM_SCHEDULERS.register_module()
class InverseSqrtLR(ExponentialLR):
    """Learning rate ``peak · sqrt(begin / t)`` after a warm-up (arXiv 1706.03762, §5.3).

    t counts epochs (or iterations, with ``by_epoch=False``) from the start of the run; at t = begin
    the rate is what the schedulers before it have reached. A warm-up is mmengine's ``LinearLR``
    with ``end`` equal to ``begin``.

    Args:
        optimizer: Optimizer or optimizer wrapper.
        begin: First t of the decay, 1 or larger: the length of the warm-up.
        by_epoch: Whether t counts epochs. mmengine gives the end of the run as ``end``, and counts
            it in epochs unless the config says ``by_epoch=False``.
        **kwargs: ``end``, ``last_step`` and ``verbose`` of mmengine's schedulers.

    Raises:
        ValueError: ``begin`` is below 1.
    """

    def __init__(self, optimizer: Any, begin: int, by_epoch: bool = True, **kwargs: Any) -> None:
        check_int('begin of InverseSqrtLR', begin, 1)
        super().__init__(optimizer, gamma=1.0, begin=begin, by_epoch=by_epoch, **kwargs)

    def _get_value(self) -> list[float]:
        # The schedulers of a list multiply, so each step is a factor on the rate before it.
        self.gamma = math.sqrt(1 - 1 / (self.begin + self.last_step))
        return super()._get_value()
