"""What a Runner uses: hooks, loops, the optimizer wrapper and its constructor, the schedule."""

from .hooks import (
    CheckImagesHook,
    CheckpointFitHook,
    CompileHook,
    DataReportHook,
    EpochSeedHook,
    EpochTimeHook,
    FiniteLossHook,
    FirstSampleHook,
    PointCloudHook,
    RegularizationHook,
    ResumeCheckHook,
    SafeCheckpointHook,
    SampleHook,
    StopSignalHook,
    SuperResolutionHook,
    TimeBudgetHook,
    ValidateFirstHook,
)
from .layer_decay import LayerDecayOptimWrapperConstructor
from .loops import GenerationTestLoop, TranslationTestLoop
from .optim_wrapper import AutocastOptimWrapper
from .param_scheduler import InverseSqrtLR
from .stop_signals import Stopped, StopSignals

__all__ = [
    'AutocastOptimWrapper',
    'CheckImagesHook',
    'CheckpointFitHook',
    'CompileHook',
    'DataReportHook',
    'EpochSeedHook',
    'EpochTimeHook',
    'FiniteLossHook',
    'FirstSampleHook',
    'GenerationTestLoop',
    'InverseSqrtLR',
    'LayerDecayOptimWrapperConstructor',
    'PointCloudHook',
    'RegularizationHook',
    'ResumeCheckHook',
    'SafeCheckpointHook',
    'SampleHook',
    'StopSignalHook',
    'StopSignals',
    'Stopped',
    'SuperResolutionHook',
    'TimeBudgetHook',
    'TranslationTestLoop',
    'ValidateFirstHook',
]
