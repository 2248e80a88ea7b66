"""Models made on the meta device and initialised after to_empty are those made directly."""

import copy
import math

import pytest
import torch
from torch import nn

from aft_mm import layers
from aft_mm.layers.position_bias import (
    ConvPositionBias,
    FactorizedPositionBias,
    FreeLocalPositionBias,
    FreePositionBias,
    MemoryPositionBias,
)
from aft_mm.models import AFTClassifier, AFTViT, AutoregressiveModel, SimpleFeaturePyramid
from aft_mm.registry import MODELS

from ..helpers import each
from .mixer_cases import MIXERS, ONE_DIMENSIONAL, D, mixer_class

CONV = dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3, init_peak=2.0)
ARCH = dict(embed_dims=16, num_layers=2)


def mixer(name):
    grid = (15,) if name in ONE_DIMENSIONAL else (3, 5)
    return lambda: mixer_class(name)(embed_dims=D, grid=grid, **MIXERS[name])


def language_model(tied):
    return AutoregressiveModel(
        decoder=dict(
            type='aft_mm.SequenceDecoder',
            embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=5, num_kinds=2),
            token_mixer=dict(type='aft_mm.AFTLocal', window=3, rank=2),
            positions='sinusoidal',
            grid=(9,),
            **ARCH,
        ),
        head=dict(type='aft_mm.CategoricalHead', embed_dims=16, num_classes=5, tied=tied),
    )


CASES = {
    **{name: mixer(name) for name in MIXERS},
    'conv bias': lambda: ConvPositionBias(3, (3, 3), init_peak=1.0),
    'factorized bias': lambda: FactorizedPositionBias((2, 3), 4, 1),
    'free bias': lambda: FreePositionBias((2, 3)),
    'memory bias': lambda: MemoryPositionBias((2, 3), (4, 6)),
    'free local bias': lambda: FreeLocalPositionBias((7,), 2, True),
    'block': lambda: layers.Block(16, CONV, (3, 5), cross_mixer=dict(type='aft_mm.AFTSimple')),
    'frames': lambda: layers.ConvFrameEmbedding(16, 8),
    'pixels': lambda: layers.PixelEmbedding(16, 3),
    'backbone': lambda: AFTViT(ARCH, 32, token_mixer=CONV, conv_stem=True),
    'backbone with a class token': lambda: AFTViT(ARCH, 32, with_cls_token=True),
    'classifier': lambda: AFTClassifier(ARCH, CONV, img_size=32, num_classes=3),
    'pyramid': lambda: SimpleFeaturePyramid(16, 8, 2),
    'language model': lambda: language_model(False),
    'tied language model': lambda: language_model(True),
    'encoder': lambda: MODELS.build(
        dict(type='aft_mm.BiLSTMEncoder', num_features=8, hidden_dims=16, num_layers=1)
    ),
}


def tensors(module):
    return dict([*module.named_parameters(), *module.named_buffers()])


def without_values(build):
    """Make a module on the meta device, then with memory that holds none of its values."""
    with torch.device('meta'):
        module = build()
    assert all(t.is_meta for t in tensors(module).values())
    module.to_empty(device='cpu')
    with torch.no_grad():
        for t in tensors(module).values():
            t.fill_(math.nan if t.is_floating_point() else 1)
    return module


@each('case', CASES)
def test_reset_parameters_gives_a_new_module(case):
    build = CASES[case]
    torch.manual_seed(1)
    fresh = build()
    module = without_values(build)
    torch.manual_seed(1)
    module.reset_parameters()
    found, expected = tensors(module), tensors(fresh)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    # Also a copy, and one part after the other, as some tools do.
    others = without_values(build), copy.deepcopy(module)
    for other in others:
        for part in other.modules():
            if hasattr(part, 'reset_parameters'):
                part.reset_parameters()
        assert all(t.isfinite().all() for t in tensors(other).values())


def test_a_reset_is_not_undone_by_what_was_kept():
    image = torch.randn(2, 3, 32, 32)
    torch.manual_seed(1)
    model = CASES['classifier']().eval()
    with torch.no_grad():
        before = model(image)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=3)
        assert not torch.allclose(model(image), before)
        torch.manual_seed(1)
        model.reset_parameters()
        assert not model.training
        torch.testing.assert_close(model(image), before)


def test_other_devices_types_and_fewer_layers():
    arguments = dict(img_size=32, num_classes=3, dtype=torch.bfloat16)
    torch.manual_seed(1)
    expected = AFTClassifier(ARCH, CONV, **arguments)
    model = AFTClassifier(ARCH, CONV, device='meta', **arguments)
    assert next(model.parameters()).is_meta
    model.prune_intermediate_layers(1, prune_head=False)
    model.to_empty(device='cpu')
    torch.manual_seed(1)
    model.reset_parameters()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    )
    model.prune_intermediate_layers([0])
    model.reset_parameters()
    model.reset_classifier(5)
    with pytest.raises(RuntimeError, match=r'head\.fc\.weight'):
        model.reset_parameters()
