"""AFTConvSigned against the reference, and what the difference of two kernels implies."""

from copy import deepcopy

import pytest
import torch

from aft_mm.layers import AFTConv, AFTConvSigned
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


def relative_error(got, expected):
    return ((got.double() - expected).square().mean() / expected.square().mean()).sqrt()


@pytest.mark.parametrize('causal', [False, True])
def test_close_kernels_are_subtracted_before_rounding(causal):
    """Early in training the difference is far below a rounding error of bfloat16."""
    torch.manual_seed(0)
    mixer = AFTConvSigned(12, 4, 3, grid=(20,), causal=causal).eval()
    with torch.no_grad():
        mixer.proj.bias.zero_()
        mixer.pos_bias.gamma.normal_(std=0.02)
    x = (X + 1).bfloat16()
    expected = deepcopy(mixer).double()(x.double())
    with torch.autocast('cpu', torch.bfloat16):
        assert relative_error(mixer(x.float()), expected) < 0.03
    half = mixer.bfloat16()
    expected = deepcopy(half).double()(x.double())
    assert relative_error(half(x), expected) < 0.03
    if causal:
        state = half.init_state(2)
        for t in range(20):
            y, state = half.step(x[:, t], state)
        assert relative_error(y, expected[:, -1]) < 0.03


def test_the_initial_peaks_are_those_of_the_first_kernels():
    options = dict(kernel_size=3, grid=(5, 5), init_peak=6.0)
    signed, plain = AFTConvSigned(9, 9, **options), AFTConv(9, 9, **options)
    positive, negative = signed.pos_bias().flatten(1).chunk(2)
    assert torch.equal(positive.argmax(1), plain.pos_bias().flatten(1).argmax(1))
    assert positive.amax(1).min() > 4.5 and negative.abs().max() < 1e-6
