"""The ops and steps that have a kernel; dispatch loads them when one first serves."""

from .conv import aft_conv
from .normalized import aft_local_learned
from .product_library import aft_full, aft_local
from .scan import aft_simple
from .step import (
    aft_conv_step,
    aft_full_step,
    aft_local_hard_step,
    aft_local_step,
    aft_simple_step,
)
from .window import aft_local_hard

__all__ = [
    'aft_simple',
    'aft_conv',
    'aft_conv_step',
    'aft_full',
    'aft_full_step',
    'aft_local',
    'aft_local_learned',
    'aft_local_step',
    'aft_simple_step',
    'aft_local_hard',
    'aft_local_hard_step',
]
