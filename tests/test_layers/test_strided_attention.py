"""Strided and fixed attention against attention with a dense mask."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aft_mm.layers import StridedAttention

D, HEADS = 12, 3
LAYOUTS = [
    (1, dict(stride=3)),
    (7, dict(stride=7)),
    (23, dict(stride=5)),
    (40, dict(stride=4)),
    (9, dict(stride=20)),
    (10, dict(stride=1)),
    (23, dict(stride=5, qk_dims=6)),
    (1, dict(stride=3, pattern='fixed', summary=1)),
    (23, dict(stride=5, pattern='fixed', summary=2)),
    (40, dict(stride=4, pattern='fixed', summary=4)),
    (9, dict(stride=20, pattern='fixed', summary=3)),
]
every_layout = pytest.mark.parametrize('tokens, options', LAYOUTS, ids=str)
both_ways = pytest.mark.parametrize('causal', [False, True], ids=['all', 'causal'])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def build(tokens, causal, **options):
    mixer = StridedAttention(D, HEADS, grid=(tokens,), causal=causal, **options)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer.double()


def dense_mask(tokens, causal, stride, pattern='strided', summary=None, qk_dims=None):
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for t in range(tokens):
        for s in range(t + 1 if causal else tokens):
            if pattern == 'strided':
                mask[t, s] = abs(t - s) <= stride or (t - s) % stride == 0
            else:
                mask[t, s] = t // stride == s // stride or s % stride >= stride - summary
    return mask


@pytest.mark.parametrize('masked', [False, True], ids=['all tokens', 'masked'])
@both_ways
@every_layout
def test_equals_dense_attention_under_its_mask(tokens, options, causal, masked):
    mixer = build(tokens, causal, **options)
    x = torch.randn(2, tokens, D, dtype=torch.float64, requires_grad=True)
    visible = dense_mask(tokens, causal, **options).expand(2, -1, -1)
    key_mask = torch.rand(2, tokens) < 0.7 if masked else None
    if masked:
        visible = visible & key_mask[:, None]
    some = visible.any(-1, keepdim=True)

    def heads(y):
        return y.unflatten(2, (HEADS, -1)).transpose(1, 2)

    parts = heads(mixer.query(x)), heads(mixer.key(x)), heads(mixer.value(x))
    mixed = F.scaled_dot_product_attention(*parts, attn_mask=(visible | ~some)[:, None])
    expected = mixer.proj(mixed.transpose(1, 2).flatten(2) * some)
    got, visible = mixer(x, key_mask=key_mask), key_mask if masked else slice(None)
    torch.testing.assert_close(got[visible], expected[visible])
    inputs = [x, *mixer.parameters()]
    for a, b in zip(
        torch.autograd.grad(got[visible].square().sum(), inputs),
        torch.autograd.grad(expected[visible].square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize('lengths', [None, (0, 5), (20, 11)], ids=str)
@every_layout
def test_steps_equal_the_forward(tokens, options, lengths):
    mixer = build(tokens, True, **options)
    x = torch.randn(2, tokens, D, dtype=torch.float64)
    expected, each = mixer(x), torch.arange(2)
    start, state = torch.tensor(lengths or (0, 0)).clamp_max(tokens - 1), mixer.init_state(2)
    if start.max() > 0:
        _, state = mixer.prefill(x[:, : start.max()], start)
    for n in range(tokens - int(start.max())):
        y_t, state = mixer.step(x[each, start + n], state)
        torch.testing.assert_close(y_t, expected[each, start + n])


def test_memory_per_token_grows_with_the_root_of_the_tokens():
    def saved(tokens, stride):
        sizes = {}

        def pack(tensor):
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        mixer = build(tokens, True, stride=stride)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mixer(torch.randn(1, tokens, D, dtype=torch.float64))
        return sum(sizes.values()) / tokens

    assert saved(4096, 64) < 2.2 * saved(1024, 32)
