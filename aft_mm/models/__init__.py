"""Models: what a config builds by name."""

from .algorithms import AutoregressiveModel
from .backbones import AFTViT
from .data_preprocessor import SequencePreprocessor
from .decoders import SequenceDecoder
from .encoders import SequenceEncoder
from .heads import CategoricalHead

__all__ = [
    'AFTViT',
    'AutoregressiveModel',
    'CategoricalHead',
    'SequenceDecoder',
    'SequenceEncoder',
    'SequencePreprocessor',
]
