"""``aft_mm convert deit``: AFT-conv initialised from DeiT."""

import re

import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import CheckpointLoader, load_checkpoint
from torch import nn

from aft_mm import ops
from aft_mm.checkpoint import load_weights
from aft_mm.convert.deit_to_aft import build_backbone

from ..errors import stops
from ..helpers import ROOT, command

TABLE_8 = (
    ROOT / 'configs/image_classification/aft-conv-base-h32-k25_8xb8-100e-from-deit_in1k-384px.py'
)
HEADS, DEPTH = 6, 2


def build_deit(name):
    """timm's DeiT-tiny of two layers, at 384 px, with other weights in every tensor."""
    torch.manual_seed(0)
    settings = dict(depth=DEPTH, img_size=384, num_classes=7)
    model = timm.create_model(name, pretrained=False, **settings).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture(scope='module')
def deit():
    return build_deit('deit_tiny_patch16_224')


def in_mmpretrain(model):
    renamed = {
        'patch_embed.proj.': 'patch_embed.projection.',
        'blocks.': 'layers.',
        'mlp.fc1': 'ffn.layers.0.0',
        'mlp.fc2': 'ffn.layers.1',
        'head.': 'head.layers.head.',
        'head_dist.': 'head.layers.head_dist.',
    }
    state = {}
    for name, tensor in model.state_dict().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        name = re.sub(r'\bnorm(\d?)\.', lambda found: f'ln{found[1] or 1}.', name)
        state[name if name.startswith('head.') else f'backbone.{name}'] = tensor
    init_default_scope('mmpretrain')
    arch = dict(embed_dims=192, num_layers=DEPTH, num_heads=3, feedforward_channels=768)
    backbone, head = 'VisionTransformer', 'VisionTransformerClsHead'
    if hasattr(model, 'head_dist'):
        backbone, head = 'DistilledVisionTransformer', 'DeiTClsHead'
    backbone = dict(type=backbone, arch=arch, img_size=384)
    head = dict(type=head, num_classes=7, in_channels=192)
    theirs = dict(type='ImageClassifier', backbone=backbone, head=head)
    MODELS.build(theirs).load_state_dict(state)
    return dict(meta={}, state_dict=state)


NAMINGS = {
    'timm': lambda model: model.state_dict(),
    'official': lambda model: dict(model=model.state_dict()),
    'mmpretrain': in_mmpretrain,
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / 'small.py'
    path.write_text(
        f"_base_ = '{TABLE_8}'\n"
        f"load_from = '{tmp_path / 'aft.pth'}'\n"
        f'model = dict(backbone=dict(arch=dict(_delete_=True, embed_dims=192, num_layers={DEPTH}),'
        f' token_mixer=dict(num_heads={HEADS}, kernel_size=5)),'
        ' head=dict(in_channels=192, num_classes=7))\n'
    )
    return path


@pytest.fixture
def convert(config, tmp_path, capsys):
    def call(checkpoint, *options):
        torch.save(checkpoint, tmp_path / 'deit.pth')
        files = [str(tmp_path / name) for name in ('deit.pth', 'aft.pth')]
        command('convert deit')([*files, '--config', str(config), *options])
        return capsys.readouterr().out

    return call


def build(config):
    config = Config.fromfile(config)
    init_default_scope(config.default_scope)
    model = MODELS.build(config.model).eval()
    for parameter in model.parameters():  # no initial value may remain by accident
        nn.init.normal_(parameter, std=0.5)
    return model, config


@pytest.mark.parametrize(
    'naming, size', [('timm', 224), ('official', 384), ('mmpretrain', 384)], ids=str
)
def test_the_model_without_mixing_is_deit(
    naming, size, deit, config, convert, tmp_path, monkeypatch
):
    """If values are passed through, everything except query, key and bias equals DeiT."""
    convert(NAMINGS[naming](deit))
    model, cfg = build(config)
    weights = CheckpointLoader.load_checkpoint(cfg.load_from, map_location='cpu')
    load_weights(model, weights, name='fine-tuning', strict=True)
    load_checkpoint(model, cfg.load_from)

    image = torch.randn(2, 3, size, size)
    x = deit.patch_embed.proj(image).flatten(2).transpose(1, 2)
    with torch.no_grad():
        for block in deit.blocks:
            value = block.attn.qkv(block.norm1(x)).chunk(3, -1)[2]
            x = x + block.attn.proj(value)
            x = x + block.mlp(block.norm2(x))
        monkeypatch.setattr(ops, 'aft_conv', lambda query, key, value, *_, **__: value)
        (ours,) = model.backbone(image)
        logits = model(image, mode='tensor')
    features = deit.norm(x).mean(1)
    torch.testing.assert_close(ours, features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits, deit.head(features), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('naming', NAMINGS)
def test_the_first_classifier_of_a_distilled_deit_is_copied(naming, config, convert):
    distilled = build_deit('deit_tiny_distilled_patch16_224')
    printed = re.sub(r'[^\S\n]+', ' ', convert(NAMINGS[naming](distilled)))
    model, cfg = build(config)
    load_checkpoint(model, cfg.load_from)
    features = torch.randn(5, 192)
    with torch.no_grad():
        logits, other = model.head((features,)), distilled.head_dist(features)
        torch.testing.assert_close(logits, distilled.head(features))
    assert (logits - other).abs().max() > 0.1
    second = 'head.layers.head_dist' if naming == 'mmpretrain' else 'head_dist'
    assert f'│ {second}.weight │ 1 │ not copied: its input is the distillation token │' in printed


def test_a_classifier_of_mean_tokens_is_copied(deit, config, convert):
    state = {name: x for name, x in deit.state_dict().items() if name != 'cls_token'}
    convert(state)
    model, cfg = build(config)
    load_checkpoint(model, cfg.load_from)
    assert torch.equal(model.head.fc.weight, deit.head.weight)


def test_no_head_keeps_the_initial_classifier(deit, config, convert, tmp_path):
    config.write_text(config.read_text().replace('num_classes=7', 'num_classes=5'))
    printed = re.sub(r'[^\S\n]+', ' ', convert(deit.state_dict(), '--no-head'))
    assert '│ head.weight │ 1 │ not copied: --no-head omits it │' in printed
    state = torch.load(tmp_path / 'aft.pth', weights_only=True)['state_dict']
    assert all(name.startswith('backbone.') for name in state)
    model, cfg = build(config)
    weight = model.head.fc.weight.clone()
    load_weights(model, dict(state_dict=state), name='fine-tuning', strict=False)
    assert torch.equal(model.head.fc.weight, weight)
    assert torch.equal(model.backbone.norm.weight, deit.norm.weight)


def test_query_and_key_keep_their_initial_values(deit, config, convert, tmp_path):
    convert(deit.state_dict())
    state = torch.load(tmp_path / 'aft.pth', weights_only=True)['state_dict']
    fresh = build_backbone(Config.fromfile(config), query=False).state_dict()
    head = {'head.fc.weight', 'head.fc.bias'}
    assert state.keys() == {f'backbone.{name}' for name in fresh} | head
    for name, tensor in fresh.items():
        new = re.search(r'query|key|pos_bias', name) is not None
        assert torch.equal(state[f'backbone.{name}'], tensor) == new, name


def test_options_take_query_and_averaged_keys(deit, convert, tmp_path):
    convert(deit.state_dict(), '--query', '--average-keys')
    state = torch.load(tmp_path / 'aft.pth', weights_only=True)['state_dict']
    x = torch.randn(5, 192)
    for i, block in enumerate(deit.blocks):
        query, key, _ = block.attn.qkv(x).chunk(3, -1)
        key = key.reshape(5, HEADS, -1).mean(-1)
        for part, expected in dict(query=query, key=key).items():
            names = (f'backbone.layers.{i}.token_mixer.{part}.{p}' for p in ('weight', 'bias'))
            ours = nn.functional.linear(x, *(state[name] for name in names))
            torch.testing.assert_close(ours, expected)
    # The file is there, and is not overwritten.
    stops(r"aft\.pth' exists already and was not changed", convert, deit.state_dict())
    assert torch.load(tmp_path / 'aft.pth', weights_only=True)['state_dict'].keys() == state.keys()


def test_the_backbone_initialises_from_a_converted_file(deit, config, convert, tmp_path):
    convert(deit.state_dict())
    start = dict(type='Pretrained', checkpoint=str(tmp_path / 'aft.pth'), prefix='backbone')
    settings = Config.fromfile(config).model.backbone
    init_default_scope('mmpretrain')
    backbone = MODELS.build({**settings, 'init_cfg': start, 'img_size': 64})
    backbone.init_weights()
    weight = deit.blocks[1].attn.qkv.weight[384:]
    assert torch.equal(backbone.layers[1].token_mixer.value.weight, weight)


def test_the_table_lists_every_tensor(deit, convert):
    printed = re.sub(r'[^\S\n]+', ' ', convert(deit.state_dict()))
    for line in (
        '│ pos_embed │ 1 │ not copied: AFT-conv has a position bias instead │',
        '│ head.weight │ 1 │ head.fc.weight │',
        f'│ blocks.*.mlp.fc2.weight │ {DEPTH} │ backbone.layers.*.mlp.3.weight │',
        f'│ blocks.*.attn.qkv.bias (value) │ {DEPTH} │ backbone.layers.*.token_mixer.value.bias │',
        f'│ blocks.*.attn.qkv.bias (key) │ {DEPTH} │ not copied: it has another meaning in AFT; '
        '--average-keys copies it │',
        f'│ │ {DEPTH} │ backbone.layers.*.token_mixer.query.weight is newly initialised │',
    ):
        assert line in printed


# Weights that are added or, with None, removed.
REFUSED = [
    ({'patch_embed.proj.weight': None}, 'must be a vision transformer in the naming of timm'),
    (
        {'blocks.1.attn.q_norm.weight': torch.ones(64)},
        'must be a plain vision transformer with one class token, got one with blocks.1.attn.q_norm',
    ),
    (
        {'blocks.0.attn.qkv.weight': torch.ones(3 * 192 - 64, 192)},
        r'blocks\.0\.attn\.qkv\.weight of .* must hold query, key and value .* got \[512, 192\]',
    ),
    ({'blocks.0.attn.qkv.bias': torch.ones(2)}, r'attn\.qkv\.bias of .* got \[2\]'),
    ({'blocks.1.mlp.fc1.bias': None}, r'also needs backbone\.layers\.1\.mlp\.0\.bias'),
    (
        {
            'patch_embed.proj.bias': torch.ones(96),
            'patch_embed.proj.weight': torch.ones(96, 3, 16, 16),
        },
        'must have the 192 channels of the model of --config, got 96',
    ),
    (
        {'blocks.2.norm1.bias': torch.ones(192)},
        r'does not have backbone\.layers\.2\.norm1\.bias',
    ),
    (
        {'patch_embed.proj.weight': torch.ones(192, 3, 8, 8)},
        r'weight is \[192, 3, 8, 8\], but \[192, 3, 16, 16\] there',
    ),
    (
        {'head.weight': torch.ones(9, 192), 'head.bias': torch.ones(9)},
        'must have 7 classes like the head of the config, got 9; --no-head initialises a new',
    ),
    (
        {'head.weight': None, 'head.bias': None},
        'has no classifier; --no-head initialises a new one',
    ),
    (
        {'head.layers.pre_logits.bias': torch.ones(192)},
        'got one with head.layers.pre_logits.bias',
    ),
]


@pytest.mark.parametrize('change, message', REFUSED)
def test_other_checkpoints_give_a_one_line_message(change, message, deit, convert, tmp_path):
    state = dict(deit.state_dict()) | change
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    stops(message, convert, state)
    stops('must hold tensors by name, got a int', convert, dict(model=3))
    assert not (tmp_path / 'aft.pth').exists()


MIXER = f'num_heads={HEADS}, kernel_size=5'
HEAD = "model['head'].update(type='StackedLinearClsHead', mid_channels=[8])"
LINEAR = 'linear layer such as LinearClsHead, got {}.*; --no-head'


@pytest.mark.parametrize(
    'old, new, options, message',
    [
        (
            MIXER,
            "_delete_=True, type='aft_mm.AFTSimple'",
            [],
            'must be aft_mm.AFTConv, got AFTSimple',
        ),
        (
            MIXER,
            f"{MIXER}, type='aft_mm.AFTConvSigned'",
            [],
            'must be aft_mm.AFTConv, got AFTConvSigned',
        ),
        (
            MIXER,
            f'{MIXER}, query=False',
            ['--query'],
            '--query needs a --config whose mixer has a query',
        ),
        ('7))\n', "7))\nmodel['head'] = None\n", [], LINEAR.format('None')),
        ('7))\n', f'7))\n{HEAD}\n', [], LINEAR.format('StackedLinearCls')),
    ],
)
def test_configs_of_other_models_are_refused(old, new, options, message, deit, config, convert):
    config.write_text(config.read_text().replace(old, new))
    stops(message, convert, deit.state_dict(), *options)
    if '--no-head' in message:
        convert(deit.state_dict(), '--no-head')
