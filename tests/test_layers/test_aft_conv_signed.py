"""AFTConvSigned against the reference, and what the difference of two kernels implies."""

import pytest
import torch

from aft_mm.layers import AFTConvSigned
from aft_mm.ops import reference

X = torch.randn(2, 20, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def build(**options) -> AFTConvSigned:
    torch.manual_seed(0)
    options = dict(num_heads=4, kernel_size=3, grid=(4, 5)) | options
    mixer = AFTConvSigned(12, **options).double().eval()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter)
    return mixer


@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(causal=True),
        dict(gate='none'),
        dict(gate='tanh'),
        dict(global_connectivity=False, kernel_size=(1, 5)),
    ],
    ids=str,
)
def test_equals_the_gated_difference_of_two_references(options):
    mixer = build(**options)
    shared = dict(grid=(4, 5), causal=mixer.causal, global_connectivity=mixer.global_connectivity)
    shared |= dict(key_mask=None, gate='none')
    positive, negative = (
        reference.aft_conv(None, mixer.key(X), mixer.value(X), w, **shared)
        for w in mixer.pos_bias().chunk(2)
    )
    gates = dict(none=torch.ones_like, sigmoid=torch.sigmoid, tanh=torch.tanh)
    gate = gates[mixer.gate](X if mixer.query is None else mixer.query(X))
    torch.testing.assert_close(mixer(X), mixer.proj(gate * (positive - negative)))


def test_a_constant_image_and_equal_kernels_mix_to_zero():
    mixer = build()
    zero = mixer.proj.bias.expand_as(X)
    torch.testing.assert_close(mixer(X[:, :1].expand_as(X)), zero)
    with torch.no_grad():
        for parameter in mixer.pos_bias.parameters():
            parameter[4:] = parameter[:4]
    torch.testing.assert_close(mixer(X), zero)
    assert mixer.position_bias().abs().max() == 0


def test_position_bias_is_the_difference_of_the_kernels_of_each_head():
    mixer = build(num_heads=2, reparameterize=False)
    weight = mixer.pos_bias.weight
    assert weight.shape == (4, 3, 3)
    torch.testing.assert_close(mixer.position_bias(), weight[:2] - weight[2:])
