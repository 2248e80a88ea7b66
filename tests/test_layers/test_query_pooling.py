"""Pooling by one learned query against its formula, and where models use it."""

import pytest
import torch

from aft_mm.analysis.plot_keys import draw_key_maps, key_maps
from aft_mm.layers import QueryPooling
from aft_mm.models import AFTViT
from aft_mm.registry import MODELS

from ..errors import refuses
from ..helpers import each

B, T, D = 3, 7, 12


def pooling(heads):
    layer = MODELS.build(dict(type='aft_mm.QueryPooling', embed_dims=D, num_heads=heads))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer.double()


def formula(layer, x):
    """The pooled tokens of one set [T, D], channel by channel."""
    weights = layer.key(x).softmax(0)
    value, gate = layer.value(x), layer.query.sigmoid()
    per_head = D // weights.shape[1]
    mean = [(weights[:, c // per_head] * value[:, c]).sum() for c in range(D)]
    return layer.proj(gate * torch.stack(mean))


@each('heads', [1, 3, D])
@pytest.mark.parametrize('masked', [False, True])
def test_equals_the_formula_with_every_gradient(heads, masked):
    layer = pooling(heads)
    x = torch.randn(B, T, D, dtype=torch.float64)
    mask = torch.rand(B, T) < 0.6 if masked else torch.ones(B, T, dtype=torch.bool)
    mask[:, 2] = True
    given = [x.masked_fill(~mask[..., None], torch.nan).requires_grad_(), x.requires_grad_()]
    got = layer(given[0], mask if masked else None)
    expected = torch.stack([formula(layer, row[keep]) for row, keep in zip(x, mask, strict=True)])
    torch.testing.assert_close(got, expected)
    cotangent = torch.randn_like(got)
    gradients = [
        torch.autograd.grad((y * cotangent).sum(), [leaf, *layer.parameters()])
        for y, leaf in zip((got, expected), given, strict=True)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
    # A set has no order, and no maximum of keys.
    order = torch.randperm(T)
    masks = (mask[:, order],) if masked else ()
    torch.testing.assert_close(layer(x[:, order], *masks), got)
    assert layer(1e4 * x, mask).isfinite().all()


def test_the_query_and_the_keys_matter():
    layer, x = pooling(1), torch.randn(B, T, D, dtype=torch.float64)
    before = layer(x)
    for parameter in (layer.query, layer.key.weight):
        with torch.no_grad():
            parameter.add_(1)
        assert not torch.allclose(layer(x), before)
        before = layer(x)
    with torch.no_grad():
        layer.key.weight.zero_()
    mean = layer.proj(layer.query.sigmoid() * layer.value(x).mean(1))
    torch.testing.assert_close(layer(x), mean)


def test_a_backbone_pools_its_visible_tokens():
    arch = dict(embed_dims=D, num_layers=1, mlp_ratio=1)
    mixer = dict(type='aft_mm.AFTConv', num_heads=4, kernel_size=3)
    options = dict(patch_size=4, token_mixer=mixer, position_embedding=False)
    options |= dict(with_mask_channel=True, out_type='query_pooling')
    model = AFTViT(arch, 16, **options).eval()
    small = torch.randn(1, 3, 8, 12)
    alone = torch.cat([small, torch.ones(1, 1, 8, 12)], 1)
    batch = torch.randn(1, 4, 16, 20)
    batch[:, 3] = 0
    batch[:, :, :8, :12] = alone
    (pooled,) = model(alone)
    assert pooled.shape == (1, D)
    torch.testing.assert_close(model(batch)[0], pooled)
    maps = AFTViT(arch, 16, **(options | dict(out_type='featmap'))).eval()
    maps.load_state_dict({k: v for k, v in model.state_dict().items() if 'pooling' not in k})
    tokens = maps(alone)[0].flatten(2).mT
    torch.testing.assert_close(model.pooling(tokens), pooled)
    pooled.sum().backward()
    assert all(p.grad is not None for p in model.pooling.parameters())


def test_its_map_has_a_row_with_one_panel():
    layers = {'layer 0': torch.randn(6, D), 'pooling': torch.randn(6, 1)}
    maps = {name: key_maps(key, (2, 3)) for name, key in layers.items()}
    weights = layers['pooling'].double().softmax(0)
    torch.testing.assert_close(maps['pooling'][0].flatten(), weights[:, 0] * 6)
    figure = draw_key_maps(torch.zeros(8, 12, 3).numpy(), maps, 'even:4')
    titles = [axis.get_title() for axis in figure.axes if axis.get_visible()]
    assert titles.count('head 0') == 2 and titles.count('image') == 2
    assert len([title for title in titles if title.startswith('head')]) == 5


def test_wrong_arguments():
    refuses('num_heads must be an int that divides embed_dims=12, got 5', QueryPooling, D, 5)
    refuses('embed_dims must be an int, 1 or larger, got 0', QueryPooling, 0)
    layer, x = pooling(3), torch.randn(B, T, D)
    for wrong in (x[0], x[..., :5], x.long(), [1]):
        refuses(r'x must be a tensor of floats \[B, T, 12\], got', layer, wrong)
    mask = torch.ones(B, T, dtype=torch.bool)
    for wrong in (mask.long(), mask.float(), mask[:, 1:], mask[:1], mask.tolist()):
        refuses(r'key_mask must be bool \[3, 7\] with True for tokens to keep', layer, x, wrong)
