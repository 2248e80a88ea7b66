"""Hooks of a run."""

from .check_images_hook import CheckImagesHook
from .checkpoint_fit_hook import CheckpointFitHook
from .compile_hook import CompileHook
from .data_report_hook import DataReportHook
from .epoch_seed_hook import EpochSeedHook
from .epoch_time_hook import EpochTimeHook
from .finite_loss_hook import FiniteLossHook
from .first_sample_hook import FirstSampleHook
from .loss_unit_hook import LossUnitHook
from .minutes_hook import MinutesHook
from .picture_hook import PictureHook
from .point_cloud_hook import PointCloudHook
from .regularization_hook import RegularizationHook
from .resume_check_hook import ResumeCheckHook
from .safe_checkpoint_hook import SafeCheckpointHook
from .sample_hook import SampleHook
from .stop_signal_hook import StopSignalHook
from .super_resolution_hook import SuperResolutionHook
from .time_budget_hook import TimeBudgetHook
from .validate_first_hook import ValidateFirstHook

__all__ = [
    'CheckImagesHook',
    'CheckpointFitHook',
    'CompileHook',
    'DataReportHook',
    'EpochSeedHook',
    'EpochTimeHook',
    'FiniteLossHook',
    'FirstSampleHook',
    'LossUnitHook',
    'MinutesHook',
    'PictureHook',
    'PointCloudHook',
    'RegularizationHook',
    'ResumeCheckHook',
    'SafeCheckpointHook',
    'SampleHook',
    'StopSignalHook',
    'SuperResolutionHook',
    'TimeBudgetHook',
    'ValidateFirstHook',
]
