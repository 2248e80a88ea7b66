"""Steps of a data pipeline; flips, crops and resizing are mmcv's and mmpretrain's."""

from .images import LoadRGBImage, SuperResolutionPair
from .points import LoadPoints, PackPointCloud
from .sequences import PackSequence, RandomValueShift

__all__ = [
    'LoadPoints',
    'LoadRGBImage',
    'PackPointCloud',
    'PackSequence',
    'RandomValueShift',
    'SuperResolutionPair',
]
