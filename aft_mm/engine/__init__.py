"""The Runner and what it uses: hooks, loops, the optimizer wrapper and its constructor."""

from .hooks import (
    CheckImagesHook,
    CheckpointFitHook,
    CompileHook,
    DataReportHook,
    EpochSeedHook,
    EpochTimeHook,
    FiniteLossHook,
    FirstSampleHook,
    LossUnitHook,
    MinutesHook,
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
from .runner import ConsoleRunner, build_runner
from .stop_signals import Stopped, StopSignals

__all__ = [
    'AutocastOptimWrapper',
    'CheckImagesHook',
    'CheckpointFitHook',
    'CompileHook',
    'ConsoleRunner',
    'DataReportHook',
    'EpochSeedHook',
    'EpochTimeHook',
    'FiniteLossHook',
    'FirstSampleHook',
    'GenerationTestLoop',
    'InverseSqrtLR',
    'LayerDecayOptimWrapperConstructor',
    'LossUnitHook',
    'MinutesHook',
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
    'build_runner',
]
