"""Inferencers for each task, and models by name."""

from .generators import ImageGenerator, PointCloudGenerator, TextGenerator, write_ply
from .images import ImageClassifier, ImagePredictor, Prediction
from .loading import get_model, list_models, load_model, register_models
from .speech_recognizer import Recognition, SpeechRecognizer
from .super_resolver import SuperResolver
from .translator import Translation, Translator

__all__ = [
    'ImageClassifier',
    'ImageGenerator',
    'ImagePredictor',
    'PointCloudGenerator',
    'Prediction',
    'Recognition',
    'SpeechRecognizer',
    'SuperResolver',
    'TextGenerator',
    'Translation',
    'Translator',
    'get_model',
    'list_models',
    'load_model',
    'register_models',
    'write_ply',
]
