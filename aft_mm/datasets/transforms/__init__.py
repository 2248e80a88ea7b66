"""Pipeline steps; flips, crops and resizing come from mmcv and mmpretrain."""

from .images import LoadRGBImage, SuperResolutionPair
from .points import LoadPoints, PackPointCloud
from .sequences import PackSequence, RandomValueShift
from .speech import LoadUtterance, NormalizeFeatures, PackUtterance, SpecAugment, StackFrames

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
