"""Steps of a data pipeline; flips, crops and resizing are mmcv's and mmpretrain's."""

from .images import LoadRGBImage, SuperResolutionPair
from .points import LoadPoints, PackPointCloud
from .sequences import PackSequence, RandomValueShift
from .speech import (
    LoadUtterance,
    NormalizeFeatures,
    PackUtterance,
    SpecAugment,
    StackFrames,
)

__all__ = [
    'LoadPoints',
    'LoadRGBImage',
    'LoadUtterance',
    'NormalizeFeatures',
    'PackPointCloud',
    'PackSequence',
    'PackUtterance',
    'RandomValueShift',
    'SpecAugment',
    'StackFrames',
    'SuperResolutionPair',
]
