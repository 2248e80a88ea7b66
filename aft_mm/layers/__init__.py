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
from .mixers.aft_bias import AFTBias as AFTBias
from .mixers.aft_conv import AFTConv as AFTConv
from .mixers.aft_conv_signed import AFTConvSigned as AFTConvSigned
from .mixers.aft_decay import AFTDecay as AFTDecay
from .mixers.aft_full import AFTFull as AFTFull
from .mixers.aft_local import AFTLocal as AFTLocal
from .mixers.aft_local_hard import AFTLocalHard as AFTLocalHard
from .mixers.aft_local_learned import AFTLocalLearned as AFTLocalLearned
from .mixers.aft_simple import AFTSimple as AFTSimple
from .mixers.dense_synthesizer import DenseSynthesizer as DenseSynthesizer
from .mixers.depthwise_conv import DepthwiseConv as DepthwiseConv
from .mixers.identity import Identity as Identity
from .mixers.lambda_layer import LambdaLayer as LambdaLayer
from .mixers.linear_attention import LinearAttention as LinearAttention
from .mixers.local_softmax_attention import LocalSoftmaxAttention as LocalSoftmaxAttention
from .mixers.lsh_attention import LSHAttention as LSHAttention
from .mixers.lstm import LSTM as LSTM
from .mixers.performer_attention import PerformerAttention as PerformerAttention
from .mixers.pooling import Pooling as Pooling
from .mixers.softmax_attention import SoftmaxAttention as SoftmaxAttention
from .mixers.strided_attention import StridedAttention as StridedAttention
from .mixers.token_shift import TokenShift as TokenShift
from .query_pooling import QueryPooling
from .resetting import Resettable

# For editors and type checkers; a new mixer is found without it.
globals().update(MIXERS)

__all__ = [
    'AFTMixer',
    'Block',
    'ConvFrameEmbedding',
    'FrameEmbedding',
    'GridParameters',
    'ConvPatchEmbedding',
    'PatchEmbedding',
    'PixelEmbedding',
    'PositionEmbedding',
    'QueryPooling',
    'Resettable',
    'SinusoidalPositions',
    'TokenEmbedding',
    'TokenMixer',
]
__all__ += list(MIXERS)

# They import names of this module.
load_mixers_of_others()
