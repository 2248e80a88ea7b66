"""The backbone: sizes, outputs, other image sizes, checkpoints, mmpretrain, torch.compile."""

import numpy as np
import pytest
import timm
import torch
from mmengine.model import BaseModule
from mmengine.registry import DefaultScope
from mmengine.runner.checkpoint import load_state_dict
from mmpretrain.registry import MODELS as HOST_MODELS
from mmpretrain.structures import DataSample
from torch import nn

from aft_mm.models import AFTViT
from aft_mm.registry import MODELS

from ..errors import refuses, refuses_value
from ..helpers import each

ARCH = dict(embed_dims=12, num_layers=3, mlp_ratio=2)
CONV = dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3)
FULL = dict(type='aft_mm.AFTFull', rank=4)
SOFTMAX = dict(type='aft_mm.SoftmaxAttention', num_heads=3)
LAMBDA = dict(type='aft_mm.LambdaLayer', num_heads=3, key_dims=5)
CLS = dict(with_cls_token=True, out_type='cls_token')


def tiny(**kwargs) -> AFTViT:
    """Return a backbone with three layers of 12 channels, 4 × 4 patches and random parameters."""
    model = AFTViT(**{**dict(arch=ARCH, img_size=32, patch_size=8, token_mixer=FULL), **kwargs})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def conv(heads, kernel, **kwargs):
    mixer = dict(type='aft_mm.AFTConv', num_heads=heads, kernel_size=kernel, **kwargs)
    return dict(token_mixer=mixer, position_embedding=False)


def deit(heads):
    return dict(token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=heads), **CLS)


def test_the_backbone_with_softmax_attention_equals_timm_deit():
    theirs = timm.create_model('deit_tiny_patch16_224', num_classes=0, depth=2, img_size=64).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.05)
    ours = AFTViT(arch=dict(embed_dims=192, num_layers=2), img_size=64, **deit(3)).eval()
    renamed = {
        'patch_embed.proj': 'patch_embed.projection',
        'blocks': 'layers',
        'pos_embed': 'pos_embed.weight',
        'attn.proj': 'token_mixer.proj',
        'fc1': '0',
        'fc2': '3',
    }
    state = {}
    for name, tensor in theirs.state_dict().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        tensor = tensor[0] if name == 'pos_embed.weight' else tensor
        if 'attn.qkv' in name:
            for part, chunk in zip(('query', 'key', 'value'), tensor.chunk(3), strict=True):
                state[name.replace('attn.qkv', f'token_mixer.{part}')] = chunk
        else:
            state[name] = tensor
    ours.load_state_dict(state)
    image = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(image)[0], theirs(image), atol=1e-4, rtol=1e-4)


def test_output_types_are_views_of_the_same_tokens():
    maps = tiny(with_cls_token=True, out_type='featmap', out_indices=(0, -1))
    image = torch.randn(2, 3, 32, 24)
    outputs = maps(image)
    assert [tuple(y.shape) for y in outputs] == [(2, 12, 4, 3)] * 2
    for out_type, expected in [('avg_featmap', outputs[1].mean((2, 3))), ('cls_token', None)]:
        other = tiny(with_cls_token=True, out_type=out_type)
        other.load_state_dict(maps.state_dict())
        (y,) = other(image)
        assert y.shape == (2, 12)
        if expected is not None:
            torch.testing.assert_close(y, expected)
        else:
            shifted = y - other(image + torch.randn_like(image))[0]
            assert shifted.abs().max() > 1e-3


def test_the_final_norm_is_only_on_the_last_layer():
    normed = tiny(out_type='featmap', out_indices=(1, 2))
    plain = tiny(out_type='featmap', out_indices=(1, 2), final_norm=False)
    plain.load_state_dict({k: v for k, v in normed.state_dict().items() if k[:5] != 'norm.'})
    image = torch.randn(2, 3, 32, 32)
    middle, last = normed(image)
    assert torch.equal(middle, plain(image)[0])
    expected = normed.norm(plain(image)[1].permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    torch.testing.assert_close(last, expected)


def test_layers_after_the_last_output_do_not_run():
    model = tiny(out_indices=0)
    model(torch.randn(1, 3, 32, 32))[0].sum().backward()
    assert model.layers[0].norm1.weight.grad is not None
    assert model.layers[1].norm1.weight.grad is None


@pytest.mark.parametrize('mixer', [CONV, FULL, SOFTMAX, LAMBDA], ids=lambda mixer: mixer['type'])
def test_checkpointing_changes_no_gradient_and_no_running_statistics(mixer):
    gradients, buffers = [], []
    image = torch.randn(2, 3, 32, 32)
    plain = tiny(token_mixer=mixer, drop_path_rate=0.5, drop_rate=0.1)
    for with_cp in (False, True):
        model = tiny(token_mixer=mixer, drop_path_rate=0.5, drop_rate=0.1, with_cp=with_cp)
        model.load_state_dict(plain.state_dict())
        torch.manual_seed(1)
        model(image)[0].square().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        buffers.append(dict(model.named_buffers()))
    torch.testing.assert_close(*buffers)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
        if not name.endswith(('key.bias', 'key_norm.bias')):  # no output depends on it
            assert gradient.abs().max() > 1e-6, name


def test_drop_path_rises_linearly():
    rates = [layer.drop_path.p for layer in tiny(drop_path_rate=0.3).layers]
    assert rates == pytest.approx([0, 0.15, 0.3])


@pytest.mark.parametrize('stages', [-1, 0, 1, 3])
def test_frozen_stages(stages):
    model = tiny(frozen_stages=stages, drop_rate=0.1, **CLS).train()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    groups = {'patch_embed', 'cls_token', 'pos_embed', *(f'layers.{i}' for i in range(stages))}
    expected = groups if stages > 0 else set()
    expected = expected | ({'norm'} if stages == 3 else set())
    assert frozen == {
        name
        for name, _ in model.named_parameters()
        if any(name == group or name.startswith(group + '.') for group in expected)
    }
    assert [layer.training for layer in model.layers] == [i >= stages for i in range(3)]
    if 0 < stages < 3:
        before = {name: p.clone() for name, p in model.named_parameters()}
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
        model(torch.randn(2, 3, 32, 32))[0].square().sum().backward()
        optimizer.step()
        moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        assert not moved & frozen and any(name.startswith('layers.2') for name in moved)


def aft(name, **options):
    return dict(token_mixer=dict(type=f'aft_mm.{name}', **options))


@pytest.mark.parametrize(
    'options',
    [
        aft('AFTFull', rank=4),
        {**aft('AFTFull', rank=4), **CLS},
        aft('AFTFull', rank=None),
        aft('AFTLocal', window=3, rank=4),
        aft('AFTLocal', window=(2, 5), rank=4),
    ],
    ids=str,
)
@pytest.mark.parametrize('size', [(40, 40), (24, 61)], ids=str)
def test_loading_and_forward_interpolate_another_grid_alike(options, size):
    small, large = tiny(**options), tiny(img_size=size, **options)
    large.load_state_dict(small.state_dict())
    image = torch.randn(2, 3, *size)
    torch.testing.assert_close(large(image), small(image))
    again = tiny(**options)
    again.load_state_dict(small.state_dict())
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(image)[0], small(image)[0])


@pytest.mark.parametrize('mixer', [CONV, FULL, SOFTMAX], ids=lambda mixer: mixer['type'])
@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning')
@torch.no_grad()
def test_a_trace_equals_the_model(mixer):
    model, image, other = tiny(token_mixer=mixer).eval(), *torch.randn(2, 2, 3, 32, 32)
    torch.testing.assert_close(torch.jit.trace(model, image)(other), model(other))


def torch_load(model, state):
    model.load_state_dict(state, strict=False)


LOADERS = [pytest.param(torch_load, id='torch'), pytest.param(load_state_dict, id='mmengine')]


@pytest.mark.parametrize('load', LOADERS)
@pytest.mark.parametrize(
    'other, message',
    [
        (dict(token_mixer=CONV), r'layers of AFTFull and D=12: it lacks backbone.layers.0.*pos_u'),
        (dict(arch={**ARCH, 'num_layers': 2}), 'lacks backbone.layers.2.norm1.weight and .* more'),
        (dict(arch={**ARCH, 'num_layers': 4}), 'an unknown backbone.layers.3.norm1.weight and'),
        (dict(arch={**ARCH, 'mlp_ratio': 1}), 'another shape of backbone.layers.0.mlp.0.weight'),
        (dict(patch_size=4), 'another shape of backbone.patch_embed.projection.weight'),
        (dict(arch={**ARCH, 'embed_dims': 24}), 'D=12: it has another shape of backbone.patch_emb'),
        (CLS, r'unknown backbone.cls_token'),
        (dict(position_embedding=False), r'lacks backbone.pos_embed.weight'),
        (dict(token_mixer={**FULL, 'rank': 5}), r'pos_u .* interpolable to .* got \[16, 5\]'),
        (dict(img_size=(8, 88)), r'pos_embed.weight .* interpolable to .* got \[11, 12\]'),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_architecture_is_refused(load, other, message):
    state = nn.ModuleDict(dict(backbone=tiny(**other), head=nn.Linear(2, 2))).state_dict()
    refuses(message, load, nn.ModuleDict(dict(backbone=tiny(), head=nn.Linear(2, 2))), state)


@pytest.mark.parametrize('load', LOADERS)
def test_missing_backbone_keys_are_refused_and_foreign_keys_are_not(load):
    state = {'blocks.0.norm1.weight': torch.ones(12)}
    refuses('lacks patch_embed.projection.weight', load, tiny(), state)
    load(tiny(), {**tiny().state_dict(), 'head.weight': torch.ones(3)})


@pytest.mark.parametrize('load', LOADERS)
def test_the_refusal_of_a_checkpoint_says_how_to_load_it(load, tmp_path):
    whole = nn.ModuleDict(dict(backbone=tiny(), head=nn.Linear(2, 2))).state_dict()
    message = r"lacks patch_embed.* more, which it has under 'backbone.': .* prefix='backbone.'\)$"
    refuses(message, load, tiny(), whole)
    torch.save(whole, tmp_path / 'whole.pth')
    options = dict(type='Pretrained', checkpoint=str(tmp_path / 'whole.pth'))
    refuses(message, tiny(init_cfg=options).init_weights)
    found = tiny(init_cfg=dict(options, prefix='backbone.'))
    found.init_weights()
    assert torch.equal(found.norm.weight, whole['backbone.norm.weight'])
    few, model = tiny(arch={**ARCH, 'num_layers': 2}).state_dict(), tiny()
    state = {f'ema.{name}': value for name, value in tiny().state_dict().items() if 'norm' in name}
    end = r'; \{\*\*model.state_dict\(\), \*\*checkpoint\} keeps those of the model$'
    refuses(f'lacks layers.2.norm1.weight and .* more{end}', load, model, {**few, **state})
    load(model, {**model.state_dict(), **few})
    assert torch.equal(model.layers[1].norm1.weight, few['layers.1.norm1.weight'])


class LowRank(nn.Module):
    """As an adapter that keeps the layer inside."""

    def __init__(self, layer):
        super().__init__()
        self.frozen, self.down = layer, nn.Linear(12, 2)


class LowRankLinear(nn.Linear):
    """As an adapter that is the layer."""

    def __init__(self, layer):
        super().__init__(12, 12)
        self.down = nn.Linear(12, 2)


@pytest.mark.parametrize('load', LOADERS)
@pytest.mark.parametrize('adapter', [LowRank, LowRankLinear])
@pytest.mark.parametrize('place', ['layers.1.token_mixer.query', 'layers.0.token_mixer.proj'])
def test_the_weights_of_adapters_are_loaded_alone(load, adapter, place):
    def adapted():
        model = nn.ModuleDict(dict(backbone=tiny()))
        path = f'backbone.{place}'
        model.set_submodule(path, adapter(model.get_submodule(path)))
        return model

    one, other = adapted(), adapted()
    alone = {name: value for name, value in one.state_dict().items() if '.down.' in name}
    before = {name: value.clone() for name, value in other.state_dict().items()}
    load(other, alone)
    for name, value in other.state_dict().items():
        assert torch.equal(value, alone.get(name, before[name])), name
    name, value = next(iter(alone.items()))
    refuses(f'another shape of {name}', load, other, {name: value[:1]})
    refuses('lacks backbone.', load, other, {'head.weight': value})
    refuses('unknown backbone.layers.3', load, other, {**alone, 'backbone.layers.3.weight': value})
    refuses('lacks backbone.', load, nn.ModuleDict(dict(backbone=tiny())), {'backbone.a.b': value})


@pytest.mark.parametrize('load', LOADERS)
def test_other_parts_are_no_adapters(load):
    model = tiny()
    model.extra = nn.Parameter(torch.ones(2))
    few = tiny(arch={**ARCH, 'num_layers': 2}).state_dict()
    refuses('lacks ', load, model, few)
    del model._built  # as in a module saved by an earlier version
    refuses('lacks ', load, model, few)


def test_a_classifier_checkpoint_initialises_the_backbone_of_another_size(tmp_path):
    classifier = nn.ModuleDict(dict(backbone=tiny(), head=nn.Linear(2, 2)))
    torch.save(dict(state_dict=classifier.state_dict()), tmp_path / 'classifier.pth')
    pretrained = dict(type='Pretrained', checkpoint=str(tmp_path / 'classifier.pth'))
    model = tiny(img_size=48, init_cfg=dict(prefix='backbone.', **pretrained))
    model.init_weights()
    image = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(model(image), classifier['backbone'](image))


def test_layer_depth_for_layer_wise_decay():
    model = tiny(**CLS)
    depths = {
        name: model.get_layer_depth('backbone.' + name, 'backbone.')
        for name, _ in model.named_parameters()
    }
    assert depths['cls_token'] == depths['pos_embed.weight'] == (0, 5)
    assert depths['patch_embed.projection.bias'] == (0, 5)
    assert depths['layers.0.token_mixer.pos_bias.pos_u'] == (1, 5)
    assert depths['layers.2.mlp.0.weight'] == (3, 5)
    assert depths['norm.weight'] == model.get_layer_depth('head.weight', 'backbone.') == (4, 5)


@pytest.mark.parametrize('head', ['LinearClsHead', 'VisionTransformerClsHead'])
@pytest.mark.parametrize('scope', ['mmpretrain', 'aft_mm'])
def test_inside_an_image_classifier(head, scope):
    options = CLS if head == 'VisionTransformerClsHead' else {}
    backbone = dict(type='aft_mm.AFTViT', arch=ARCH, img_size=32, patch_size=8, **options)
    loss = dict(type='mmpretrain.CrossEntropyLoss')
    config = dict(
        type='mmpretrain.ImageClassifier',
        _scope_='mmpretrain',
        backbone=dict(**backbone, token_mixer=FULL),
        head=dict(type=head, num_classes=5, in_channels=12, loss=loss),
    )
    with DefaultScope.overwrite_default_scope(scope):
        model = HOST_MODELS.build(config)
    assert isinstance(model.backbone, AFTViT) and isinstance(model.backbone, BaseModule)
    before = model.backbone.layers[0].mlp[0].weight.clone()
    model.init_weights()
    assert torch.equal(model.backbone.layers[0].mlp[0].weight, before)
    image = torch.randn(2, 3, 32, 32)
    for parameter in model.head.parameters():  # zeros at the start
        nn.init.normal_(parameter)
    samples = [DataSample().set_gt_label(label) for label in (1, 4)]
    model(image, samples, mode='loss')['loss'].backward()
    scores = torch.stack([s.pred_score for s in model(image, samples, mode='predict')])
    torch.testing.assert_close(scores.sum(1), torch.ones(2))
    assert model.backbone.patch_embed.projection.weight.grad.abs().max() > 0
    assert model.get_layer_depth('backbone.layers.1.norm1.weight') == (2, 5)


@pytest.mark.parametrize(
    'mixer', [CONV, pytest.param(FULL, marks=pytest.mark.nightly)], ids=lambda mixer: mixer['type']
)
def test_the_backbone_compiles_without_graph_breaks(mixer):
    model = tiny(arch={**ARCH, 'num_layers': 1}, token_mixer=mixer, drop_path_rate=0.1)
    model.eval()
    image = torch.randn(2, 3, 32, 32)
    expected = model(image)
    compiled = torch.compile(model, fullgraph=True, backend='eager', dynamic=False)
    torch.testing.assert_close(compiled(image), expected)
    assert compiled.train()(torch.randn(2, 3, 30, 40))[0].requires_grad


@pytest.mark.parametrize(
    'config, message',
    [
        (dict(arch='huge'), "arch must be one of tiny, small, base, got 'huge'"),
        (dict(arch=dict(embed_dims=3)), 'arch must be a dict of embed_dims, num_layers and mlp_r'),
        (dict(arch=dict(ARCH, depth=2)), 'arch must be a dict .* got .*depth'),
        (dict(out_type='raw'), "out_type must be one of avg_featmap, .* got 'raw'"),
        (dict(out_type='cls_token'), "got 'cls_token' with with_cls_token=False"),
        (dict(out_indices=3), 'out_indices must be one or more ints, -3 to 2, got 3'),
        (dict(out_indices=()), r'out_indices must be one or more ints, -3 to 2, got \(\)'),
        (dict(frozen_stages=4), 'frozen_stages must be an int, 3 or smaller, got 4'),
        (dict(token_mixer=CONV, **CLS), 'num_prefix_tokens must be 0 for AFTConv, got 1'),
    ],
    ids=str,
)
def test_bad_arguments_raise_a_one_line_error(config, message):
    refuses(message, MODELS.build, dict(type='aft_mm.AFTViT', **{'arch': ARCH, **config}))


WRONG = dict(
    arch=(5, dict(ARCH, num_layers=1.0), dict(ARCH, mlp_ratio='4')),
    img_size=('32', (32,), 32.0, 0, (32, -1), None),
    patch_size=(2.5, '2', 0),
    out_indices=('all', 1.0, None),
    token_mixer=('aft_mm.AFTConv', dict(num_heads=4), [], 5),
    drop_rate=(2, -1, 'a'),
    drop_path_rate=(2.0, -1.0, None),
    in_channels=(0,),
    frozen_stages=('all',),
    with_cls_token=('yes',),
    final_norm=(1,),
)


@each('name, values', WRONG.items())
def test_values_of_another_type_are_refused(name, values):
    for value in values:
        refuses_value(name, tiny, **{name: value})


def test_what_are_no_images_is_refused():
    model = tiny()
    for wrong in (
        *(None, 'x', torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, 1, 8, 8)),
        *(torch.zeros(3, 8, 8), torch.zeros(2, 3, 0, 0), np.zeros((2, 3, 8, 8))),
    ):
        refuses_value('image', model, wrong)


def test_features_of_a_megapixel_equal_those_in_float64(monkeypatch):
    model = AFTViT(
        arch=dict(embed_dims=192, num_layers=2),
        img_size=1024,
        patch_size=16,
        out_type='featmap',
        **conv(32, 11),
    ).eval()
    for name, parameter in model.named_parameters():
        if 'pos_bias' in name:
            nn.init.normal_(parameter, std=0.5)
    image = torch.randn(1, 3, 1024, 1024)
    with torch.no_grad():
        (found,) = model(image)
        monkeypatch.setenv('AFT_MM_BACKEND', 'eager')
        (expected,) = model.double()(image.double())
    assert expected.std() > 0.1
    torch.testing.assert_close(found.double(), expected, atol=1e-3 * expected.std().item(), rtol=0)
