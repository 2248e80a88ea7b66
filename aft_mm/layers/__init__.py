"""Layers with parameters: token mixers, the block around them, embeddings, position biases."""

from .block import Block
from .embedding import PatchEmbedding, PixelEmbedding, PositionEmbedding, TokenEmbedding
from .grid import GridParameters
from .mixers import (
    AFTConv,
    AFTFull,
    AFTLocal,
    AFTLocalNormalized,
    AFTMixer,
    AFTSimple,
    AFTWindow,
    LocalSoftmaxAttention,
    SoftmaxAttention,
    TokenMixer,
)

__all__ = [
    'AFTConv',
    'AFTFull',
    'AFTLocal',
    'AFTLocalNormalized',
    'AFTMixer',
    'AFTSimple',
    'AFTWindow',
    'Block',
    'GridParameters',
    'LocalSoftmaxAttention',
    'PatchEmbedding',
    'PixelEmbedding',
    'PositionEmbedding',
    'SoftmaxAttention',
    'TokenEmbedding',
    'TokenMixer',
]
