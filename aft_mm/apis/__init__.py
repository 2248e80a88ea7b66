"""What a person calls from Python."""

from .image_classifier import ImageClassifier
from .image_generator import ImageGenerator
from .inputs import (
    build_dataset,
    class_names,
    load_images,
    network_inputs,
    shown_image,
    spread_samples,
    takes_bgr,
)
from .loading import check_draws, load_model, task_of
from .models import get_model, list_models, register_models
from .networks import (
    Network,
    batches_for,
    layers_of,
    load_network,
    modules_named,
    noise_images,
    num_prefix_tokens,
)
from .point_cloud_generator import PointCloudGenerator, write_ply
from .speech_recognizer import Recognition, SpeechRecognizer
from .super_resolver import SuperResolver
from .text_generator import TextGenerator
from .translator import Translation, Translator

__all__ = [
    'ImageClassifier',
    'ImageGenerator',
    'Network',
    'PointCloudGenerator',
    'Recognition',
    'SpeechRecognizer',
    'SuperResolver',
    'TextGenerator',
    'Translation',
    'Translator',
    'batches_for',
    'build_dataset',
    'check_draws',
    'class_names',
    'get_model',
    'layers_of',
    'list_models',
    'load_images',
    'load_model',
    'load_network',
    'modules_named',
    'network_inputs',
    'noise_images',
    'num_prefix_tokens',
    'register_models',
    'shown_image',
    'spread_samples',
    'takes_bgr',
    'task_of',
    'write_ply',
]
