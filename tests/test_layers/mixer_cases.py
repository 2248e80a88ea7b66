"""The table of mixers that the tests of this folder run over."""

import torch
from torch import nn

from aft_mm.layers import TokenMixer
from aft_mm.registry import MODELS

D, B = 12, 2
MIXERS = {
    'AFTFull': dict(rank=5),
    'AFTFull-free': dict(rank=None),
    'AFTLocal': dict(window=2, rank=5),
    'AFTLocal-free': dict(window=2, rank=None),
    'AFTLocalLearned': dict(window=2, rank=5),
    'AFTLocalLearned-free': dict(window=2, rank=None),
    'AFTSimple': dict(),
    'AFTSimple-relu': dict(key_function='relu'),
    'AFTSimple-relu2': dict(key_function='relu2'),
    'AFTConv': dict(num_heads=4, kernel_size=3),
    'AFTConv-no-query': dict(num_heads=12, kernel_size=3, query=False),
    'AFTConv-degenerate': dict(num_heads=1, kernel_size=5, global_connectivity=False),
    'AFTConv-naive': dict(num_heads=6, kernel_size=3, reparameterize=False),
    'AFTLocalHard': dict(window=4),
    'SoftmaxAttention': dict(num_heads=3),
    'SoftmaxAttention-stateless': dict(num_heads=3, stateful=False),
    'LocalSoftmaxAttention': dict(num_heads=3, window=2),
    'LocalSoftmaxAttention-margin': dict(num_heads=4, window=3, margin=1),
    'LinearAttention': dict(num_heads=3),
    'LinearAttention-square': dict(num_heads=2, feature_map='square'),
    'PerformerAttention': dict(num_heads=3, num_features=10),
    'DenseSynthesizer': dict(num_heads=3),
    'LambdaLayer': dict(num_heads=3, key_dims=5),
    'StridedAttention': dict(num_heads=3, stride=3),
    'StridedAttention-fixed': dict(num_heads=2, stride=4, pattern='fixed', summary=2, qk_dims=10),
    'LSHAttention': dict(num_heads=3, num_rounds=2, num_buckets=2, chunk_size=4),
    'LSHAttention-one-bucket': dict(num_heads=2, num_rounds=1, num_buckets=1, chunk_size=5),
}
# A batch's statistics tell its tokens of one another.
NEVER_CAUSAL = ('LambdaLayer',)
GRIDS = [(1,), (7,), (3, 5), (6, 1)]
UNNORMALISED = (
    'AFTSimple-relu',
    'AFTSimple-relu2',
    'AFTLocalLearned',
    'AFTLocalLearned-free',
    'LambdaLayer',
)
ONE_DIMENSIONAL = ('AFTLocal-free', 'AFTLocalLearned-free')

CAUSAL = [name for name in MIXERS if name not in NEVER_CAUSAL]


def build(name: str, grid=(7,), **kwargs) -> TokenMixer:
    """A mixer whose parameters are all random, so that none hides behind a zero."""
    if name in ONE_DIMENSIONAL:  # the raster of the grid
        grid = (torch.Size(grid).numel(),)
    config = dict(type='aft_mm.' + name.partition('-')[0], embed_dims=D, grid=grid)
    mixer = MODELS.build({**config, **MIXERS[name], **kwargs})
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer


def tokens(grid) -> torch.Tensor:
    return torch.randn(B, torch.Size(grid).numel(), D)
