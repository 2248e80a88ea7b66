"""Token mixers, one file each; all are registered in MODELS."""

from .aft_conv import AFTConv
from .aft_full import AFTFull
from .aft_local import AFTLocal
from .aft_local_normalized import AFTLocalNormalized
from .aft_simple import AFTSimple
from .aft_window import AFTWindow
from .base import AFTMixer, ProjectedMemory, TokenMixer
from .local_softmax_attention import LocalSoftmaxAttention
from .softmax_attention import SoftmaxAttention

__all__ = [
    'AFTConv',
    'AFTFull',
    'AFTLocal',
    'AFTLocalNormalized',
    'AFTMixer',
    'AFTSimple',
    'AFTWindow',
    'LocalSoftmaxAttention',
    'ProjectedMemory',
    'SoftmaxAttention',
    'TokenMixer',
]
