"""Mean relative attention, and recorded attention of models of three libraries."""

import numpy as np
import pytest
import timm
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from aft_mm.analysis.networks import attention_probabilities, record_attention
from aft_mm.analysis.plot_attention import (
    MeanAttention,
    draw_relative_attention,
    mean_attention_distance,
    mean_relative_attention,
)
from aft_mm.cli.main import main


def test_mean_over_the_queries_that_have_a_token_at_an_offset():
    attention = torch.randn(2, 6, 6).softmax(-1)
    found = mean_relative_attention(attention, (2, 3))

    assert found.shape == (2, 3, 5)
    for head in range(2):
        for row in range(-1, 2):
            for column in range(-2, 3):
                seen = [
                    float(attention[head, t, s])
                    for t in range(6)
                    for s in range(6)
                    if (s // 3 - t // 3, s % 3 - t % 3) == (row, column)
                ]
                assert float(found[head, row + 1, column + 2]) == pytest.approx(np.mean(seen))


def test_probabilities_are_those_of_torch():
    """Attention with the identity as value, for each kind of mask, a scale and shared keys."""
    query, key, eye = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8), torch.eye(5)
    masks = dict(is_causal=True), dict(attn_mask=torch.randn(5, 5)), dict(attn_mask=eye > 0)
    for options in (dict(), *masks, dict(scale=0.7)):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key, eye.expand(2, 4, 5, 5), **options
        )
        torch.testing.assert_close(attention_probabilities(query, key, key, **options), expected)
    shared = attention_probabilities(query, key[:, ::2], key[:, ::2], enable_gqa=True)
    torch.testing.assert_close(shared, attention_probabilities(query, key[:, [0, 0, 2, 2]], key))


def first_attention_of_timm(model, image):
    x = model.norm_pre(model._pos_embed(model.patch_embed(image)))
    block = model.blocks[0]
    qkv = block.attn.qkv(block.norm1(x))
    q, k, _ = qkv.unflatten(-1, (3, block.attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def first_attention_of_ours(model, image):
    x, _ = model._embed(image)
    mixer, x = model.layers[0].token_mixer, model.layers[0].norm1(x)
    q, k = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (mixer.query, mixer.key))
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def first_attention_of_mmpretrain(model, image):
    x = torch.cat([model.cls_token, model.patch_embed(image)[0]], 1) + model.pos_embed
    layer = model.layers[0]
    qkv = layer.attn.qkv(layer.ln1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    return (qkv[0] @ qkv[1].mT / qkv.shape[-1] ** 0.5).softmax(-1)


@torch.no_grad()
def test_attention_of_three_libraries_is_recorded():
    init_default_scope('mmpretrain')
    sizes, arch = dict(img_size=16, patch_size=4), dict(embed_dims=16, num_layers=2)
    ours = dict(type='aft_mm.AFTViT', with_cls_token=True, out_type='cls_token', arch=arch, **sizes)
    ours['token_mixer'] = dict(type='aft_mm.SoftmaxAttention', num_heads=4)
    arch = dict(arch, num_heads=4, feedforward_channels=32)
    theirs = dict(type='VisionTransformer', arch=arch, **sizes)
    options = dict(sizes, embed_dim=16, depth=2, num_heads=4, num_classes=2)
    models = {
        'ours': (MODELS.build(ours), first_attention_of_ours),
        'mmpretrain': (MODELS.build(theirs), first_attention_of_mmpretrain),
        'timm': (timm.models.VisionTransformer(**options), first_attention_of_timm),
    }
    image = torch.randn(1, 3, 16, 16)
    for name, (model, first) in models.items():
        seen = []
        model.eval()  # which mmpretrain does not return
        with record_attention(seen.append):
            model(image)
        assert [tuple(attention.shape) for attention in seen] == 2 * [(1, 4, 17, 17)], name
        torch.testing.assert_close(seen[0], first(model, image), msg=name)


@torch.no_grad()
def test_blocks_with_other_attention_are_left_out_and_keep_their_numbers(here):
    names = 'SoftmaxAttention', 'AFTSimple', 'LocalSoftmaxAttention', 'SoftmaxAttention'
    heads = dict(SoftmaxAttention=dict(num_heads=4))
    heads['LocalSoftmaxAttention'] = dict(num_heads=4, window=(2, 2))
    mixers = [dict(type=f'aft_mm.{name}', **heads.get(name, {})) for name in names]
    backbone = dict(
        type='aft_mm.AFTViT',
        arch=dict(embed_dims=16, num_layers=4),
        img_size=16,
        patch_size=4,
        token_mixer=mixers,
    )
    model = dict(
        type='ImageClassifier',
        backbone=backbone,
        head=dict(type='LinearClsHead', num_classes=2, in_channels=16),
    )
    imports = dict(imports=['aft_mm.registry'], allow_failed_imports=False)
    config = Config(dict(default_scope='mmpretrain', custom_imports=imports, model=model))
    config.dump('a.py')
    init_default_scope('mmpretrain')
    built = MODELS.build(model)
    torch.save(dict(meta={}, state_dict=built.state_dict()), 'a.pth')
    words = '--noise --num 3 --out a.png --csv a.csv'.split()
    main(['plot', 'attention', 'a.py', 'a.pth', *words])
    layers = [line.split(',')[0] for line in (here / 'a.csv').read_text().splitlines()[1:]]
    assert layers == 4 * ['layer 0'] + 4 * ['layer 3']
    seen, image = [], torch.randn(2, 3, 16, 16)
    last = built.eval().backbone.layers[3].token_mixer
    with record_attention(seen.append, [last]):
        tokens = built.backbone.forward_intermediates(image, [2], output_fmt='NLC')[1][0]
    q, k = last.query, last.key
    tokens = built.backbone.layers[3].norm1(tokens)
    q, k = (layer(tokens).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (q, k))
    torch.testing.assert_close(seen, [(q @ k.mT / 2).softmax(-1)])


def test_the_mean_over_batches_is_that_of_all_images():
    attention = torch.randn(5, 3, 2, 17, 17).softmax(-1)
    mean = MeanAttention((16, 16), 1)
    for part in attention.split([2, 3]):
        mean.next_batch(len(part))
        for layer in range(3):
            mean.take(part[:, layer])
    assert mean.images == 5 and len(mean.means()) == 3
    expected = mean_relative_attention(attention[:, 1, :, 1:, 1:].double().mean(0), (4, 4))
    torch.testing.assert_close(mean.means()['layer 1'], expected)
    with pytest.raises(ValueError, match='attention must be over 3 whole images'):
        mean.take(attention[:, 0])  # after a batch of three was announced


def test_panels_show_the_heads_and_distances_are_means():
    maps = torch.zeros(2, 3, 5, dtype=torch.float64)
    maps[0, 1, 2] = 0.5  # the query itself
    maps[1, 0, 2] = maps[1, 1, 4] = 0.25  # one row above, two columns to the right
    figure = draw_relative_attention({'layer 0': maps}, heads='1,0', footer='f')
    panels = [axis.images[0] for axis in figure.axes]
    np.testing.assert_array_equal(panels[0].get_array(), maps[1])
    assert panels[0].get_extent() == [-2.5, 2.5, 1.5, -1.5]
    assert panels[1].axes.get_title() == 'head 0, max 50 %'
    # Of a grid of 2 x 3 tokens three have one above, and two have one two columns to the right.
    np.testing.assert_allclose(mean_attention_distance(maps), [0, (3 * 1 + 2 * 2) / 5])


def test_too_many_heads_for_a_row_are_rejected():
    attention = {'0': torch.rand(384, 3, 5)}
    draw_relative_attention(attention, 'even:24')
    with pytest.raises(ValueError, match="at most 24 .*'even:12', got 'all', which chooses 384"):
        draw_relative_attention(attention, 'all')
