"""AFTBias: the bias of the call reaches it through block and encoder, and changes the output."""

import pytest
import torch
from mmengine.registry import MODELS
from torch import nn

from aft_mm import ops
from aft_mm.layers import Block

from ..errors import refuses
from .mixer_cases import B, D, build

T = 5


def test_it_is_aft_full_with_the_bias_and_mask_of_the_call():
    mixer, x, memory = build('AFTBias', num_heads=3), torch.randn(B, T, D), torch.randn(B, 7, D)
    bias, mask = torch.randn(B, 3, T, 7), torch.rand(B, T, 7) < 0.7
    key_mask = torch.arange(7) < torch.tensor([[7], [4]])
    parts = mixer.query(x), mixer.key(memory), mixer.value(memory)
    options = dict(num_heads=3, pair_mask=mask, key_mask=key_mask)
    expected = mixer.proj(ops.aft_full(*parts, bias, **options))
    got = mixer(x, memory=memory, key_mask=key_mask, position_bias=bias, pair_mask=mask)
    torch.testing.assert_close(got, expected)
    # A mask without a bias is w = 0.
    got = mixer(x, memory=memory, key_mask=key_mask, pair_mask=mask)
    expected = mixer.proj(ops.aft_full(*parts, torch.zeros_like(bias), **options))
    torch.testing.assert_close(got, expected)


def test_each_head_has_a_learned_scale():
    mixer, x = build('AFTBias', scales=[1.0, 2.0, 0.5]), torch.randn(B, T, D)
    bias = -torch.rand(T, T)
    plain = build('AFTBias', num_heads=3)
    plain.load_state_dict(mixer.state_dict(), strict=False)
    y = mixer(x, position_bias=bias)
    expected = plain(x, position_bias=mixer.scale.view(3, 1, 1) * bias)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(mixer(x, position_bias=bias.expand(B, -1, -1)), expected)
    y.square().sum().backward()
    assert (mixer.scale.grad != 0).all()


@pytest.mark.parametrize('with_cp', [False, True])
def test_a_config_feeds_it_through_the_encoder(with_cp):
    """A permutation of the tokens, their distances and the mask permutes the output."""
    encoder = MODELS.build(
        dict(
            type='aft_mm.SequenceEncoder',
            embed_dims=D,
            num_layers=2,
            embedding=dict(type='aft_mm.FrameEmbedding', num_features=2),
            token_mixer=dict(type='aft_mm.AFTBias', scales=[1.0, 4.0]),
            grid=(T,),
            with_cp=with_cp,
        )
    )
    nn.init.zeros_(encoder.position_embedding.weight)  # no order
    points, order = torch.rand(B, T, 2), torch.randperm(T)
    mask = torch.rand(B, T, T) < 0.7

    def encode(points, mask):
        return encoder(points, position_bias=-torch.cdist(points, points), pair_mask=mask)

    y = encode(points, mask)
    torch.testing.assert_close(encode(points[:, order], mask[:, order][:, :, order]), y[:, order])
    assert (encoder(points, position_bias=torch.zeros(T, T)) - y).abs().max() > 1e-3
    y.square().sum().backward()
    assert all((layer.token_mixer.scale.grad != 0).all() for layer in encoder.layers)


def test_bad_calls_name_the_argument():
    x, bias = torch.randn(B, T, D), torch.randn(T, T)
    simple, scaled = Block(D, dict(type='aft_mm.AFTSimple')), build('AFTBias', scales=[1.0, 2.0])
    message = r'must be left out for AFTSimple, which takes .*, key_mask, cu_seqlens, got .*5\]'
    refuses(f'position_bias {message}', simple, x, position_bias=bias)
    refuses(f'mask {message}', simple.token_mixer, x, mask=bias)
    refuses(
        'mask must be left out for AFTBias, which takes .*, pair_mask, got', scaled, x, mask=bias
    )
    refuses('position_bias must be given for AFTBias with scales', scaled, x)
    message = r'position_bias must be \[T, S\] or \[B, T, S\] with sca'
    refuses(message, scaled, x, position_bias=bias[None, None])
    refuses(r'position_bias must be a tensor of .* got \[1, 2\]', scaled, x, position_bias=[1, 2])
    for mask in ([True], torch.ones(T, T, dtype=torch.bool), torch.ones(B, T, T)):
        message = rf'pair_mask must be bool \[{B}, {T}, {T}\] with True'
        refuses(message, build('AFTBias'), x, pair_mask=mask)
    for message, options in {
        'num_heads must be None with scales, got 2': dict(scales=[1.0, 2.0], num_heads=2),
        'scales must be a list of numbers, one per head, got 2.0': dict(scales=2.0),
        'scales must be a list whose length divides embed_dims=12': dict(scales=[1.0] * 5),
        'num_heads must be an int that divides embed_dims=12, got 5': dict(num_heads=5),
    }.items():
        refuses(message, build, 'AFTBias', **options)
    causal = build('AFTBias', causal=True)
    refuses('AFTBias must have _init_state and _mix_step', causal.init_state, 1)
