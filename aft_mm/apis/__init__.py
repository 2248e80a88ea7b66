"""What a person calls from Python."""

from .image_classifier import ImageClassifier
from .image_generator import ImageGenerator
from .loading import check_draws, load_model, task_of
from .models import get_model, list_models, register_models
from .point_cloud_generator import PointCloudGenerator, write_ply
from .super_resolver import SuperResolver
from .text_generator import TextGenerator

__all__ = [
    'ImageClassifier',
    'ImageGenerator',
    'PointCloudGenerator',
    'SuperResolver',
    'TextGenerator',
    'check_draws',
    'get_model',
    'list_models',
    'load_model',
    'register_models',
    'task_of',
    'write_ply',
]
