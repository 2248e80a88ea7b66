"""Metrics; the name of every number contains its unit."""

from .base import GenerationMetric, Metric
from .bleu import BLEU
from .error_rate import ErrorRate
from .image_quality import ImageQuality
from .likelihood import Likelihood, TokenAccuracy
from .perceptual import FID, LPIPS
from .point_cloud_distance import PointCloudDistance

__all__ = [
    'BLEU',
    'FID',
    'LPIPS',
    'ErrorRate',
    'GenerationMetric',
    'ImageQuality',
    'Likelihood',
    'Metric',
    'PointCloudDistance',
    'TokenAccuracy',
]
