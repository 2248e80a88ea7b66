"""Metrics; the name of every number contains its unit."""

from .base import GenerationMetric, Metric
from .image_quality import FID, LPIPS, ImageQuality
from .likelihood import Likelihood, TokenAccuracy
from .point_cloud_distance import PointCloudDistance
from .text_metrics import BLEU, ErrorRate

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
