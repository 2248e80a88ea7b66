"""The bound of benchmark_models.py, registered once whoever imports or runs that."""

from aft_mm.layers.mixers import AFTConv
from aft_mm.registry import MODELS


@MODELS.register_module()
class ProjectionsOnly(AFTConv):
    """AFT-conv without the op: every projection runs, the value passes through."""

    def _mix(self, query, key, value, grid, key_mask):
        return value
