"""The optimizer wrapper constructor with a learning rate per layer."""

import pytest
from mmengine.optim import OptimWrapper, build_optim_wrapper
from mmengine.registry import DefaultScope
from torch import nn

from aft_mm.models import AFTViT, SimpleFeaturePyramid

NO_DECAY = dict(
    norm_decay_mult=0.0,
    bias_decay_mult=0.0,
    custom_keys={'pos_embed': dict(decay_mult=0.0), 'pos_bias': dict(decay_mult=0.0)},
)


class Detector(nn.Module):
    def __init__(self, backbone=None, **options):
        super().__init__()
        arch = dict(embed_dims=8, num_layers=3)
        mixer = dict(type='aft_mm.AFTFull', rank=2)
        self.backbone = backbone or AFTViT(
            arch, img_size=32, token_mixer=mixer, out_type='featmap', **options
        )
        self.neck = SimpleFeaturePyramid(8, out_channels=4)
        self.bbox_head = nn.Conv2d(4, 2, 1)


def build(model, scope='mmengine', lr=0.1, weight_decay=0.5, **paramwise) -> OptimWrapper:
    optimizer = dict(type='AdamW', weight_decay=weight_decay)
    config = dict(
        constructor='aft_mm.LayerDecayOptimWrapperConstructor',
        optimizer=optimizer if lr is None else dict(optimizer, lr=lr),
        paramwise_cfg=paramwise,
    )
    with DefaultScope.overwrite_default_scope(scope):
        return build_optim_wrapper(model, config)


def options_by_name(model, key, **kwargs):
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = build(model, **kwargs).optimizer.param_groups
    listed = [(names[parameter], group[key]) for group in groups for parameter in group['params']]
    assert len(dict(listed)) == len(listed)
    return dict(listed)


@pytest.mark.parametrize('scope', ['mmengine', 'mmpretrain'])
def test_the_rate_falls_from_the_head_to_the_embeddings(scope):
    model = Detector()
    rates = options_by_name(model, 'lr', decay_rate=0.5, scope=scope)
    assert rates.keys() == dict(model.named_parameters()).keys()
    expected = {
        'bbox_head': 0.1,
        'neck': 0.1,
        'backbone.norm': 0.1,
        'backbone.layers.2': 0.05,
        'backbone.layers.1': 0.025,
        'backbone.layers.0': 0.0125,
        'backbone.patch_embed': 0.00625,
        'backbone.pos_embed': 0.00625,
    }
    for name, rate in rates.items():
        (group,) = [rate for stem, rate in expected.items() if name.startswith(stem + '.')]
        assert rate == pytest.approx(group), name


def test_a_rate_of_1_changes_nothing():
    assert set(options_by_name(Detector(), 'lr', decay_rate=1).values()) == {0.1}


def test_norms_biases_and_positions_are_spared_by_weight_decay_as_without_it():
    decays = options_by_name(Detector(), 'weight_decay', decay_rate=0.7, **NO_DECAY)
    for name, decay in decays.items():
        spared = name.endswith('.bias') or 'norm' in name or 'pos_' in name
        # The neck ends its levels in norms, which have no name of their own.
        spared = spared or decays[name] == 0 and name.startswith('neck.levels.')
        assert decay == (0 if spared else 0.5), name
    assert decays['backbone.layers.0.token_mixer.pos_bias.pos_u'] == 0
    assert decays['backbone.layers.0.mlp.0.weight'] == 0.5


def test_a_multiplier_of_the_rate_comes_on_top():
    keys = {'layers.1': dict(lr_mult=10.0), 'bbox_head': dict(lr_mult=3.0)}
    rates = options_by_name(Detector(), 'lr', decay_rate=0.5, custom_keys=keys)
    assert rates['bbox_head.weight'] == pytest.approx(0.3)
    assert rates['backbone.layers.1.norm1.weight'] == pytest.approx(0.25)
    assert rates['backbone.layers.2.norm1.weight'] == pytest.approx(0.05)


def test_frozen_parameters_are_left_out():
    model = Detector(frozen_stages=2)
    rates = options_by_name(model, 'lr', decay_rate=0.5)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert rates.keys() == trained and 'backbone.layers.1.norm1.weight' not in rates
    assert rates['backbone.layers.2.norm1.weight'] == pytest.approx(0.05)


def test_a_wrapped_model_has_the_same_rates():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = Detector()
    rates = [group['lr'] for group in build(Wrapper(model), decay_rate=0.5).optimizer.param_groups]
    assert rates == list(options_by_name(model, 'lr', decay_rate=0.5).values())


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(), 'decay_rate must be .* above 0 and at most 1, got None'),
        (dict(decay_rate=0), 'decay_rate must be .* above 0 and at most 1, got 0'),
        (dict(decay_rate=1.5), 'at most 1, got 1.5'),
        (dict(decay_rate='0.5'), "at most 1, got '0.5'"),
        (dict(decay_rate=0.5, lr=None), 'decay_rate needs optimizer.lr'),
    ],
    ids=str,
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message) as error:
        build(Detector(), **options)
    assert '\n' not in str(error.value)


def test_a_model_without_layers_to_count_is_refused():
    with pytest.raises(ValueError, match='such as aft_mm.AFTViT, got Detector .* type Conv2d'):
        build(Detector(nn.Conv2d(3, 8, 1)), decay_rate=0.5)
    with pytest.raises(ValueError, match='got Linear .* of type NoneType'):
        build(nn.Linear(2, 2), decay_rate=0.5)
