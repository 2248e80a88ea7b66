"""Hooks, the optimizer wrapper, and what the command line tools share."""

from .hooks import (CheckpointFitHook, CheckImagesHook, CompileHook, EpochSeedHook,
                    RegularizationHook)
from .optim_wrapper import AutocastOptimWrapper

__all__ = [
    'AutocastOptimWrapper', 'CheckImagesHook', 'CheckpointFitHook', 'CompileHook', 'EpochSeedHook',
    'RegularizationHook'
]
