"""Hooks, the test that draws, the optimizer wrapper, and what the command line tools share."""

from .hooks import (
    CheckImagesHook,
    CheckpointFitHook,
    CompileHook,
    DataReportHook,
    EpochSeedHook,
    FiniteLossHook,
    FirstSampleHook,
    PointCloudHook,
    RegularizationHook,
    SampleHook,
    SuperResolutionHook,
    TimeBudgetHook,
)
from .layer_decay import LayerDecayOptimWrapperConstructor
from .loops import GenerationTestLoop
from .optim_wrapper import AutocastOptimWrapper
from .param_scheduler import InverseSqrtLR

__all__ = [
    'AutocastOptimWrapper',
    'CheckImagesHook',
    'CheckpointFitHook',
    'CompileHook',
    'DataReportHook',
    'EpochSeedHook',
    'FiniteLossHook',
    'FirstSampleHook',
    'GenerationTestLoop',
    'InverseSqrtLR',
    'LayerDecayOptimWrapperConstructor',
    'PointCloudHook',
    'RegularizationHook',
    'SampleHook',
    'SuperResolutionHook',
    'TimeBudgetHook',
]
