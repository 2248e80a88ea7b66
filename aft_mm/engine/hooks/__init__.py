"""Hooks of a run, one file per purpose."""

from .checkpointing import (
    CheckpointCompatibilityHook,
    PeriodicCheckpointHook,
    ResumeCheckHook,
    SafeCheckpointHook,
    ValidateFirstHook,
)
from .pictures import PointCloudHook, SampleHook, SampleVisualizationHook, SuperResolutionHook
from .sanity import CheckImagesHook, FiniteLossHook, SanityCheckHook, SkippedDataReportHook
from .stopping import StopHook, TimeBudgetHook
from .training import (
    BitsPerDimHook,
    CompileHook,
    EpochTimeHook,
    ExactResumeHook,
    RegularizationHook,
)

__all__ = [
    'BitsPerDimHook',
    'CheckImagesHook',
    'CheckpointCompatibilityHook',
    'CompileHook',
    'ExactResumeHook',
    'EpochTimeHook',
    'FiniteLossHook',
    'PeriodicCheckpointHook',
    'PointCloudHook',
    'RegularizationHook',
    'ResumeCheckHook',
    'SafeCheckpointHook',
    'SampleHook',
    'SampleVisualizationHook',
    'SanityCheckHook',
    'SkippedDataReportHook',
    'StopHook',
    'SuperResolutionHook',
    'TimeBudgetHook',
    'ValidateFirstHook',
]
