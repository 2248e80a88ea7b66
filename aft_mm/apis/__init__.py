"""What a person calls from Python."""

from .image_generator import ImageGenerator
from .loading import load_model
from .text_generator import TextGenerator

__all__ = ['ImageGenerator', 'TextGenerator', 'load_model']
