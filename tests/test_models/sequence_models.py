"""Small sequence models and their mixers."""

import torch
from torch import nn

from aft_mm.layers import MIXERS as REGISTERED
from aft_mm.layers import TokenMixer
from aft_mm.models import AutoregressiveModel, SequenceDecoder
from aft_mm.registry import MODELS

D = 12
LOCAL = dict(type='aft_mm.AFTLocal', window=3, rank=4)
# Every registered mixer that can generate token by token, with its `example` arguments.
MIXERS = {
    name: cls.example
    for name, cls in REGISTERED.items()
    if cls.can_be_causal and cls._mix_step is not TokenMixer._mix_step
}
MIXERS['AFTSimple-relu'] = dict(key_function='relu')
MIXERS['AFTSimple-relu2'] = dict(key_function='relu2')


def mixer(name: str) -> dict:
    return dict(type='aft_mm.' + name.partition('-')[0], **MIXERS[name])


def all_mixers(*without: str) -> dict:
    """Return the options of a decoder with a block of each mixer."""
    mixers = [mixer(name) for name in MIXERS if name not in without]
    return dict(token_mixer=mixers, num_layers=len(mixers))


def randomize(module: nn.Module, std: float = 0.4) -> nn.Module:
    """Set random parameters, so that no error is hidden by a zero, and evaluation mode."""
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
    config = dict(
        type='aft_mm.AutoregressiveModel',
        decoder=decoder_config(**kwargs),
        head=head or dict(type='aft_mm.CategoricalHead', embed_dims=D, num_classes=7),
        encoder=encoder,
    )
    return randomize(MODELS.build(config))


def tokens(*shape: int, high: int = 7) -> torch.Tensor:
    return torch.randint(high, shape)


def assert_every_parameter_has_a_gradient(module: nn.Module, least: float = 1e-7) -> None:
    for path, parameter in module.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path
        # A constant added to all keys cancels in a quotient.
        assert parameter.grad.abs().max() > least or path.endswith('key.bias'), path
