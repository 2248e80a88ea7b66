"""Backbones, encoders, decoders, heads, necks, and the task models made of them."""

from .aft_vit import AFTViT
from .autoregressive_model import AutoregressiveModel
from .classifier import CLASSIFIERS, AFTClassifier
from .ctc_model import CTCModel
from .data_preprocessor import MaskedDataPreprocessor, SequencePreprocessor, UtterancePreprocessor
from .decoding import Hypothesis, beam_search, default_length, generate
from .encoders import BiLSTMEncoder, SequenceEncoder
from .heads import CategoricalHead, CTCHead, LogisticMixtureHead
from .necks import LayerConcat, SimpleFeaturePyramid
from .sequence_decoder import SequenceDecoder

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
