"""Small sequence models for the tests, and the table of causal mixers."""

import torch
from torch import nn

from aft_mm.models import AutoregressiveModel, SequenceDecoder
from aft_mm.registry import MODELS

D = 12
LOCAL = dict(type='aft_mm.AFTLocal', window=3, rank=4)
MIXERS = {
    'AFTFull': dict(rank=5),
    'AFTLocal': dict(window=3, rank=5),
    'AFTLocalLearned': dict(window=3, rank=5),
    'AFTSimple': dict(),
    'AFTSimple-relu': dict(key_function='relu'),
    'AFTSimple-relu2': dict(key_function='relu2'),
    'AFTConv': dict(num_heads=4, kernel_size=3),
    'AFTLocalHard': dict(window=4),
    'LocalSoftmaxAttention': dict(num_heads=3, window=2),
    'SoftmaxAttention': dict(num_heads=3),
    'LinearAttention': dict(num_heads=3),
    'PerformerAttention': dict(num_heads=3, num_features=7),
    'DenseSynthesizer': dict(num_heads=3),
    'StridedAttention': dict(num_heads=3, stride=3),
    'LSHAttention': dict(num_heads=3, num_rounds=2, num_buckets=2, chunk_size=3),
}


def mixer(name: str) -> dict:
    return dict(type='aft_mm.' + name.partition('-')[0], **MIXERS[name])


def randomize(module: nn.Module, std: float = 0.4) -> nn.Module:
    """All parameters random, so that none hides behind a zero; evaluation mode."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module.eval()


def decoder_config(grid=(9,), vocab_size=7, num_kinds=3, **kwargs) -> dict:
    embedding = dict(type='aft_mm.TokenEmbedding', vocab_size=vocab_size, num_kinds=num_kinds)
    config = dict(
        type='aft_mm.SequenceDecoder',
        embed_dims=D,
        num_layers=2,
        embedding=embedding,
        token_mixer=LOCAL,
        grid=grid,
        mlp_ratio=2,
    )
    return {**config, **kwargs}


def decoder(**kwargs) -> SequenceDecoder:
    return randomize(MODELS.build(decoder_config(**kwargs)))


def model(head=None, encoder=None, **kwargs) -> AutoregressiveModel:
    """A model of 7 values, all parameters random."""
    config = dict(
        type='aft_mm.AutoregressiveModel',
        decoder=decoder_config(**kwargs),
        head=head or dict(type='aft_mm.CategoricalHead', embed_dims=D, num_classes=7),
        encoder=encoder,
    )
    return randomize(MODELS.build(config))


def tokens(*shape: int, high: int = 7) -> torch.Tensor:
    return torch.randint(high, shape)
