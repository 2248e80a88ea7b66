"""Pipeline steps; flips, crops and resizing come from mmcv and mmpretrain."""

from . import images, points, sequences, speech

__all__ = ['images', 'points', 'sequences', 'speech']
