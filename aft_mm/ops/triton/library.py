"""The ops and steps that have a kernel."""

from .conv import aft_conv
from .full_local import aft_full, aft_local
from .local_learned import aft_local_learned
from .simple import aft_simple
from .steps import (
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
