"""Models: what a config builds by name."""

from .algorithms import AutoregressiveModel
from .backbones import AFTViT
from .data_preprocessor import SequencePreprocessor
from .decoders import SequenceDecoder
from .encoders import SequenceEncoder
from .generation import Hypothesis, beam_search, default_length, generate
from .heads import CategoricalHead, LogisticMixtureHead
from .masked_data_preprocessor import MaskedDataPreprocessor
from .necks import SimpleFeaturePyramid

__all__ = [
    'AFTViT',
    'AutoregressiveModel',
    'CategoricalHead',
    'Hypothesis',
    'LogisticMixtureHead',
    'MaskedDataPreprocessor',
    'SequenceDecoder',
    'SequenceEncoder',
    'SequencePreprocessor',
    'SimpleFeaturePyramid',
    'beam_search',
    'default_length',
    'generate',
]
