from .hooks.checkpointing import (
    CheckpointCompatibilityHook,
    PeriodicCheckpointHook,
    SafeCheckpointHook,
    TimeBudgetHook,
)
from .hooks.pictures import PointCloudHook, SampleHook, SampleVisualizationHook, SuperResolutionHook
from .hooks.resume import ExactResumeHook, ResumeCheckHook, ValidateFirstHook
from .hooks.sanity import CheckImagesHook, FiniteLossHook, SanityCheckHook, SkippedDataReportHook
from .hooks.training import (
    BitsPerDimHook,
    CompileHook,
    DiscriminantHeadHook,
    EpochTimeHook,
    RegularizationHook,
)
from .loops import GenerationTestLoop, TranslationTestLoop, derived_seed
from .optim import AutocastOptimWrapper, InverseSqrtLR, LayerDecayOptimWrapperConstructor
from .run_guard import StopSignalHook, run_guard
from .runner import ConsoleRunner, apply_safe_defaults, build_runner, load_run_config
from .stop_signals import Stopped, StopSignals

__all__ = [
    'AutocastOptimWrapper',
    'BitsPerDimHook',
    'CheckImagesHook',
    'CheckpointCompatibilityHook',
    'CompileHook',
    'ConsoleRunner',
    'DiscriminantHeadHook',
    'ExactResumeHook',
    'EpochTimeHook',
    'FiniteLossHook',
    'GenerationTestLoop',
    'InverseSqrtLR',
    'LayerDecayOptimWrapperConstructor',
    'PeriodicCheckpointHook',
    'PointCloudHook',
    'RegularizationHook',
    'ResumeCheckHook',
    'SafeCheckpointHook',
    'SampleHook',
    'SampleVisualizationHook',
    'SanityCheckHook',
    'SkippedDataReportHook',
    'StopSignalHook',
    'StopSignals',
    'Stopped',
    'SuperResolutionHook',
    'TimeBudgetHook',
    'TranslationTestLoop',
    'ValidateFirstHook',
    'apply_safe_defaults',
    'build_runner',
    'derived_seed',
    'load_run_config',
    'run_guard',
]
