"""What a person calls from Python."""

from .image_generator import ImageGenerator
from .loading import check_draws, load_model, task_of
from .point_cloud_generator import PointCloudGenerator, write_ply
from .speech_recognizer import Recognition, SpeechRecognizer
from .super_resolver import SuperResolver
from .text_generator import TextGenerator
from .translator import Translation, Translator

__all__ = [
    'ImageGenerator',
    'PointCloudGenerator',
    'Recognition',
    'SpeechRecognizer',
    'SuperResolver',
    'TextGenerator',
    'Translation',
    'Translator',
    'check_draws',
    'load_model',
    'task_of',
    'write_ply',
]
