"""The tests import ``mmcv.ops``, whose extension the registry of aft_mm supplies."""

import aft_mm.registry  # noqa: F401
