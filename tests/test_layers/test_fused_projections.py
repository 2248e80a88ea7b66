"""Query, key and value from one product, on devices where that is faster."""

import copy

import pytest
import torch

from aft_mm.layers import AFTConv
from aft_mm.layers.mixers import base
from aft_mm.layers.projections import is_plain_linear
from aft_mm.ops import dispatch

from ..helpers import OperatorLog
from .mixer_cases import MIXERS, build, tokens


def run(mixer, x):
    """Return the output, and the number of products."""
    with OperatorLog() as log:
        output = mixer(x)
    return output, sum(name in ('aten::addmm', 'aten::mm') for name in log.called)


@pytest.mark.parametrize('name', MIXERS)
def test_inference_with_one_product(name, monkeypatch):
    mixer = build(name, (3, 4)).eval()
    x = tokens((3, 4))
    layers = [mixer.query, mixer.key, mixer.value]
    fused = [layer for layer in layers if isinstance(layer, torch.nn.Linear)]
    trained = run(mixer, x)
    with torch.no_grad():
        expected, before = run(mixer, x)
        monkeypatch.setattr(base, 'FUSED_DEVICES', ('cpu',))
        got, after = run(mixer, x)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    others = [layer for layer in layers if layer is not None and not is_plain_linear(layer)]
    biases = {layer.bias is None for layer in fused}
    assert before - after == (len(fused) - 1 if not others and len(biases) == 1 else 0)
    again = run(mixer, x)  # with gradients
    assert torch.equal(again[0], trained[0]) and again[1] == trained[1]


def test_a_hook_of_one_layer_is_called(monkeypatch):
    monkeypatch.setattr(base, 'FUSED_DEVICES', ('cpu',))
    mixer, x, called = build('AFTSimple').eval(), tokens((7,)), []
    mixer.key.register_forward_hook(lambda *args: called.append(1))
    with torch.no_grad():
        mixer(x)
    assert called == [1]


@pytest.mark.parametrize('bias', [True, False])
def test_fused_weights_follow_to_another_dtype_and_device(bias):
    mixer, x = build('AFTSimple', causal=True, qkv_bias=bias).eval(), torch.randn(2, 12)
    expected = mixer.step(x, mixer.init_state(2))[0].double()
    mixer.fuse_projections()
    for dtype in (torch.float64, torch.bfloat16):
        other = torch.nn.Sequential(copy.deepcopy(mixer)).to(dtype)[0]
        got = other.step(x.to(dtype), other.init_state(2))[0]
        assert got.dtype == dtype
        error = (got.double() - expected).abs().max()
        assert error < (1e-6 if dtype == torch.float64 else 2e-2)
    fused = mixer.to('meta')._fused
    assert fused.weight.is_meta and (fused.bias is None) != bias


def test_channel_major_tokens_are_not_copied(monkeypatch):
    """The views of one product have the strides of three."""
    mixer, x = AFTConv(12, 4, 3, grid=(3, 4)).bfloat16().eval(), tokens((3, 4)).bfloat16()
    monkeypatch.setattr(dispatch, 'CHANNEL_MAJOR_DEVICES', ('cpu',))
    monkeypatch.setattr(dispatch, 'requested_backends', lambda: ('cuda', 'eager'))
    monkeypatch.setattr(dispatch.cuda_availability, 'machine_reasons', lambda kind, index: ())
    monkeypatch.setattr(base, 'FUSED_DEVICES', ('cpu',))
    with torch.no_grad():
        parts = mixer._project_all(x)
        expected = [layer(x) for layer in (mixer.query, mixer.key, mixer.value)]
    assert [part.stride() for part in parts] == [(12, 1, 24)] * 3
    for part, want in zip(parts, expected, strict=True):
        torch.testing.assert_close(part, want, rtol=2e-2, atol=2e-2)
