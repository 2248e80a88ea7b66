"""Pure tensor functions of the Attention Free Transformer; imports torch only."""

from .functional import (
    aft_conv,
    aft_full,
    aft_local,
    aft_local_normalized,
    aft_simple,
    aft_window,
)

__all__ = [
    'aft_conv',
    'aft_full',
    'aft_local',
    'aft_local_normalized',
    'aft_simple',
    'aft_window',
]
