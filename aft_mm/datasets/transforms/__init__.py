"""Steps of a data pipeline; flips, crops and resizing are mmcv's and mmpretrain's."""

from .sequences import PackSequence, RandomValueShift

__all__ = ['PackSequence', 'RandomValueShift']
