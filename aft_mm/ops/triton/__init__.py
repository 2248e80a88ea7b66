"""The CUDA backend: fused Triton kernels; what they serve stands in `ops/triton_support.py`.

Each op has three files: NAME_kernels.py, what runs on the device; NAME_launch.py, how the work is
cut and launched; NAME_library.py, the op at the torch.library boundary with its gradient.
"""

from .band_library import aft_full, aft_local
from .conv_library import aft_conv
from .simple_library import aft_simple
from .step_library import (
    aft_conv_step,
    aft_full_step,
    aft_local_step,
    aft_simple_step,
    aft_window_step,
)
from .window_library import aft_window

__all__ = [
    'aft_simple',
    'aft_conv',
    'aft_conv_step',
    'aft_full',
    'aft_full_step',
    'aft_local',
    'aft_local_step',
    'aft_simple_step',
    'aft_window',
    'aft_window_step',
]
