"""Tiny generative models whose outputs clearly depend on their inputs."""

import torch
from mmengine.registry import MODELS
from torch import nn

PIXELS = dict(type='aft_mm.PixelEmbedding', num_channels=3)
IMAGE, SOURCE = (6, 4, 3), (3, 2, 3)


def _build(**parts) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS.build(dict(type='aft_mm.AutoregressiveModel', **parts))
    for name, parameter in model.named_parameters():
        # Logits are close enough for the sampling noise to matter.
        nn.init.normal_(parameter, std=0.3 if name.startswith('head') else 1)
    return model


def stack(kind: str, **options) -> dict:
    """Return the config of a tiny encoder or decoder."""
    return dict(
        type=f'aft_mm.{kind}',
        embed_dims=8,
        num_layers=1,
        token_mixer=dict(type='aft_mm.AFTSimple'),
        **options,
    )


def super_resolution_model(channels: int = 3) -> nn.Module:
    pixels = {**PIXELS, 'num_channels': channels}
    return _build(
        encoder=stack('SequenceEncoder', embedding=pixels, grid=(3, 2)),
        decoder=stack(
            'SequenceDecoder',
            embedding=pixels,
            grid=(6, 4),
            cross_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=2),
        ),
        head=dict(
            type='aft_mm.LogisticMixtureHead', embed_dims=8, num_channels=channels, num_components=2
        ),
    )


def points_model(length: int = 15, num_values: int = 32, **options) -> nn.Module:
    """Return a model of clouds of 5 points with 5 bits per coordinate."""
    return _build(
        decoder=stack(
            'SequenceDecoder',
            grid=(length,),
            **options,
            embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=num_values, num_kinds=3),
        ),
        head=dict(type='aft_mm.CategoricalHead', embed_dims=8, num_classes=num_values),
    )
