"""Layers with parameters: token mixers, the block around them, embeddings, position biases."""

from .block import Block
from .embedding import (
    ConvFrameEmbedding,
    ConvPatchEmbedding,
    FrameEmbedding,
    PatchEmbedding,
    PixelEmbedding,
    PositionEmbedding,
    SinusoidalPositions,
    TokenEmbedding,
)
from .grid import GridParameters
from .mixers import MIXERS, AFTMixer, TokenMixer, load_mixers_of_others
from .mixers.aft_bias import AFTBias
from .mixers.aft_conv import AFTConv
from .mixers.aft_decay import AFTDecay
from .mixers.aft_full import AFTFull
from .mixers.aft_local import AFTLocal
from .mixers.aft_local_hard import AFTLocalHard
from .mixers.aft_local_learned import AFTLocalLearned
from .mixers.aft_simple import AFTSimple
from .mixers.dense_synthesizer import DenseSynthesizer
from .mixers.depthwise_conv import DepthwiseConv
from .mixers.identity import Identity
from .mixers.lambda_layer import LambdaLayer
from .mixers.linear_attention import LinearAttention
from .mixers.local_softmax_attention import LocalSoftmaxAttention
from .mixers.lsh_attention import LSHAttention
from .mixers.lstm import LSTM
from .mixers.performer_attention import PerformerAttention
from .mixers.pooling import Pooling
from .mixers.softmax_attention import SoftmaxAttention
from .mixers.strided_attention import StridedAttention
from .mixers.token_shift import TokenShift
from .query_pooling import QueryPooling
from .resetting import Resettable

# For editors and type checkers; a new mixer is found without it.
globals().update(MIXERS)

__all__ = [
    'AFTBias',
    'AFTConv',
    'AFTDecay',
    'AFTFull',
    'AFTLocal',
    'AFTLocalHard',
    'AFTLocalLearned',
    'AFTMixer',
    'AFTSimple',
    'Block',
    'ConvFrameEmbedding',
    'DenseSynthesizer',
    'DepthwiseConv',
    'FrameEmbedding',
    'GridParameters',
    'Identity',
    'LSHAttention',
    'LSTM',
    'LambdaLayer',
    'LinearAttention',
    'LocalSoftmaxAttention',
    'ConvPatchEmbedding',
    'PatchEmbedding',
    'PerformerAttention',
    'PixelEmbedding',
    'Pooling',
    'PositionEmbedding',
    'QueryPooling',
    'Resettable',
    'SinusoidalPositions',
    'SoftmaxAttention',
    'StridedAttention',
    'TokenEmbedding',
    'TokenMixer',
    'TokenShift',
]
__all__ += [name for name in MIXERS if name not in __all__]

# They import names of this module.
load_mixers_of_others()
