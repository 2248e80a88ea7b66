"""Layers with parameters: token mixers, the block around them, embeddings, position biases."""

from .block import Block
from .embedding import (
    FrameEmbedding,
    PatchEmbedding,
    PixelEmbedding,
    PositionEmbedding,
    SinusoidalPositions,
    TokenEmbedding,
)
from .grid import GridParameters
from .mixers import (
    AFTConv,
    AFTFull,
    AFTLocal,
    AFTLocalHard,
    AFTLocalLearned,
    AFTMixer,
    AFTSimple,
    DenseSynthesizer,
    LambdaLayer,
    LinearAttention,
    LocalSoftmaxAttention,
    LSHAttention,
    PerformerAttention,
    SoftmaxAttention,
    StridedAttention,
    TokenMixer,
)

__all__ = [
    'AFTConv',
    'AFTFull',
    'AFTLocal',
    'AFTLocalLearned',
    'AFTMixer',
    'AFTSimple',
    'AFTLocalHard',
    'Block',
    'DenseSynthesizer',
    'FrameEmbedding',
    'GridParameters',
    'LSHAttention',
    'LambdaLayer',
    'LinearAttention',
    'LocalSoftmaxAttention',
    'PatchEmbedding',
    'PerformerAttention',
    'PixelEmbedding',
    'PositionEmbedding',
    'SinusoidalPositions',
    'SoftmaxAttention',
    'StridedAttention',
    'TokenEmbedding',
    'TokenMixer',
]
