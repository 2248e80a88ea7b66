"""Token mixers, one file each; all are registered in MODELS."""

from .aft_conv import AFTConv
from .aft_full import AFTFull
from .aft_local import AFTLocal
from .aft_local_hard import AFTLocalHard
from .aft_local_learned import AFTLocalLearned
from .aft_simple import AFTSimple
from .base import AFTMixer, ProjectedMemory, TokenMixer
from .dense_synthesizer import DenseSynthesizer
from .lambda_layer import LambdaLayer
from .linear_attention import LinearAttention
from .local_softmax_attention import LocalSoftmaxAttention
from .lsh_attention import LSHAttention
from .performer_attention import PerformerAttention
from .softmax_attention import SoftmaxAttention
from .strided_attention import StridedAttention

__all__ = [
    'AFTConv',
    'AFTFull',
    'AFTLocal',
    'AFTLocalLearned',
    'AFTMixer',
    'AFTSimple',
    'AFTLocalHard',
    'DenseSynthesizer',
    'LSHAttention',
    'LambdaLayer',
    'LinearAttention',
    'LocalSoftmaxAttention',
    'PerformerAttention',
    'ProjectedMemory',
    'SoftmaxAttention',
    'StridedAttention',
    'TokenMixer',
]
