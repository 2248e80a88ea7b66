"""The models for timm: timm's interface, and the weights of mmpretrain's classifiers."""

import importlib
import sys

import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope
from timm.models import group_parameters
from timm.optim import param_groups_weight_decay
from torch import nn

import aft_mm.timm  # noqa: F401
from aft_mm.models import AFTClassifier

from .errors import refuses
from .helpers import nightly

NAMES = ['aft_conv_small', 'aft_conv_tiny', 'aft_full_small', 'aft_full_tiny']
CONFIGS = 'configs/image_classification'
ARCH = dict(embed_dims=12, num_layers=3)


def small(name: str = 'aft_conv_tiny', **options) -> AFTClassifier:
    mixer = dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3)
    if 'full' in name:
        mixer = dict(type='aft_mm.AFTFull', rank=4)
    options = dict(arch=ARCH, token_mixer=mixer, img_size=64, num_classes=5) | options
    return timm.create_model(name, **options).eval()


def test_models_are_listed():
    assert timm.list_models('aft_*') == NAMES


@pytest.mark.parametrize(
    'name, config',
    [
        ('aft_conv_tiny', 'aft-conv-tiny-h32-k11_8xb128-300e_in1k.py'),
        ('aft_full_tiny', 'aft-full-tiny_8xb128-300e_in1k.py'),
        *nightly(
            [
                ('aft_conv_small', 'aft-conv-small-h384-k11_8xb128-300e_in1k.py'),
                ('aft_full_small', 'aft-full-small_8xb128-300e_in1k.py'),
            ]
        ),
    ],
)
def test_a_model_and_its_config_exchange_weights(name, config):
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        ours = MODELS.build(Config.fromfile(f'{CONFIGS}/{config}').model).eval()
    model = timm.create_model(name).eval()
    model.load_state_dict(ours.state_dict())
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(model(image), ours.head(ours.extract_feat(image)))
    ours.load_state_dict(model.state_dict())


@pytest.mark.parametrize('name', ['aft_conv_tiny', 'aft_full_tiny'])
def test_classifier_is_replaced_and_pooling_changed(name):
    model, image = small(name, in_chans=1, drop_path_rate=0.3), torch.randn(2, 1, 64, 64)
    tokens = model.forward_features(image)
    torch.testing.assert_close(model(image), model.forward_head(tokens))
    pooled = model.forward_head(tokens, pre_logits=True)
    model.reset_classifier(7)
    assert model(image).shape == (2, 7) and model.get_classifier().out_features == 7
    model.reset_classifier(0)
    assert torch.equal(model(image), pooled)
    model.reset_classifier(0, '')
    assert torch.equal(model(image), tokens)
    model.reset_classifier(0, 'avg')
    torch.testing.assert_close(model(image), tokens[:, model.num_prefix_tokens :].mean(1))
    assert (pooled.equal(model(image))) == (name == 'aft_conv_tiny')
    assert [layer.drop_path.p for layer in model.backbone.layers] == [0, 0.15, 0.3]
    refuses("global_pool must be one of '', avg.*, got 'max'", model.reset_classifier, 2, 'max')


@pytest.mark.parametrize('name', ['aft_conv_tiny', 'aft_full_tiny'])
def test_drop_rates_drop_what_enters_the_classifier_or_leaves_the_embedding(name):
    plain, image = small(name), torch.randn(2, 3, 64, 64)
    nn.init.normal_(plain.head['fc'].bias)
    expected, tokens = plain(image), plain.forward_features(image)
    for rates in (dict(drop_rate=1.0), dict(proj_drop_rate=1.0)):
        model = small(name, **rates)
        model.load_state_dict(plain.state_dict())
        assert torch.equal(model(image), expected)
        model.train()
        if 'drop_rate' in rates:
            assert torch.equal(model.forward_features(image), tokens)
            assert torch.equal(model(image), model.get_classifier().bias.expand(2, 5))
        else:
            zeros = torch.zeros_like(tokens)
            torch.testing.assert_close(model.forward_features(image), model.backbone.norm(zeros))


@pytest.mark.parametrize('prune_norm', [False, True])
def test_pruning_keeps_the_norm_or_not(prune_norm):
    model, image = small('aft_full_tiny'), torch.randn(2, 3, 64, 64)
    nn.init.normal_(model.backbone.norm.weight)
    options = dict(norm=not prune_norm, output_fmt='NLC', return_prefix_tokens=True)
    ((feature, prefix),) = model.forward_intermediates(
        image, [1], intermediates_only=True, **options
    )
    assert model.prune_intermediate_layers([1], prune_norm=prune_norm) == [1]
    torch.testing.assert_close(model(image), torch.cat([prefix, feature], 1))


def test_features_only_gives_the_maps_of_the_layers():
    whole = small('aft_full_tiny')
    model = timm.create_model(
        'aft_full_tiny', features_only=True, out_indices=(0, -2), arch=ARCH, img_size=64,
        token_mixer=dict(type='aft_mm.AFTFull', rank=4),
    )  # fmt: skip
    assert model.feature_info.channels() == [12, 12] and model.feature_info.reduction() == [16, 16]
    state = {k: v for k, v in whole.state_dict().items() if k in model.model.state_dict()}
    model.model.load_state_dict(state)
    image = torch.randn(2, 3, 48, 64)
    maps = whole.forward_intermediates(image, intermediates_only=True)
    for found, expected in zip(model.eval()(image), maps[:2], strict=True):
        assert found.shape == (2, 12, 3, 4)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize('indices', [(0, 3), (-4,), (), 0, 4, 1.5])
def test_a_layer_that_does_not_exist_is_refused(indices):
    with pytest.raises(
        ValueError, match=r'indices must be (one or more ints, -3 to 2|an int, 1 to 3)'
    ):
        small().prune_intermediate_layers(indices)
    if indices not in ((), 0):  # timm's own default
        refuses('indices must be', small, features_only=True, out_indices=indices)


def test_parameter_groups_and_checkpointing():
    model = small('aft_full_tiny').train()
    groups = group_parameters(model, model.group_matcher(), reverse=True)
    assert groups['backbone.cls_token'] == groups['backbone.patch_embed.projection.weight'] == 0
    assert groups['backbone.layers.2.norm1.weight'] == 3
    assert groups['head.fc.weight'] > groups['backbone.norm.weight'] == 3
    without = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())[0]
    bias = model.backbone.layers[0].token_mixer.pos_bias.pos_u
    for parameter in (model.backbone.pos_embed.weight, bias):
        assert any(p is parameter for p in without['params'])
    image, gradients = torch.randn(2, 3, 64, 64), []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(image).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_an_unsuitable_timm_is_named(monkeypatch):
    monkeypatch.delattr('timm.models.register_model')
    monkeypatch.delitem(sys.modules, 'aft_mm.timm')
    with pytest.raises(
        ImportError, match=r'^aft_mm.timm needs another version of timm, .*\[timm\]'
    ):
        importlib.import_module('aft_mm.timm')
