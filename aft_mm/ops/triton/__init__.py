"""The CUDA backend: fused Triton kernels; what they serve stands in `ops/triton_support.py`.

Each op has three files: NAME_kernels.py, what runs on the device; NAME_launch.py, how the work is
cut and launched; NAME_library.py, the op at the torch.library boundary with its gradient.
"""

from .simple_library import aft_simple
from .window_library import aft_window

__all__ = ['aft_simple', 'aft_window']
