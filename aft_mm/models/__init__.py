"""Backbones, encoders, decoders, heads, necks, and the task models made of them."""

from .algorithms import AutoregressiveModel, CTCModel
from .backbones import AFTViT
from .classifier import CLASSIFIERS, AFTClassifier
from .data_preprocessor import (
    MaskedDataPreprocessor,
    SequencePreprocessor,
    UtterancePreprocessor,
)
from .decoders import SequenceDecoder
from .decoding import Hypothesis, beam_search, default_length, generate
from .encoders import BiLSTMEncoder, SequenceEncoder
from .heads import CategoricalHead, CTCHead, LogisticMixtureHead
from .necks import LayerConcat, SimpleFeaturePyramid

__all__ = [
    'AFTClassifier',
    'CLASSIFIERS',
    'AFTViT',
    'AutoregressiveModel',
    'BiLSTMEncoder',
    'CTCHead',
    'CTCModel',
    'CategoricalHead',
    'Hypothesis',
    'LayerConcat',
    'LogisticMixtureHead',
    'MaskedDataPreprocessor',
    'SequenceDecoder',
    'SequenceEncoder',
    'SequencePreprocessor',
    'SimpleFeaturePyramid',
    'UtterancePreprocessor',
    'beam_search',
    'default_length',
    'generate',
]
