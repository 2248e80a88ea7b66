"""Softmax attention in local blocks against attention with a dense mask."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aft_mm.layers import LocalSoftmaxAttention, SoftmaxAttention

D, HEADS = 12, 3
# Grid, window and margin: incomplete blocks, one block, no margin, a wide margin.
LAYOUTS = [
    ((1,), 4, None),
    ((7,), 7, None),
    ((12,), 4, None),
    ((63,), 5, None),
    ((30,), 4, 9),
    ((30,), 4, 0),
    ((10,), 3, 50),
    ((4, 6), (2, 3), None),
    ((7, 10), (3, 4), None),
    ((7, 10), (3, 4), (0, 2)),
    ((7, 10), (2, 3), (5, 0)),
    ((5, 9), 2, 1),
    ((3, 4), (8, 8), (1, 1)),
]
every_layout = pytest.mark.parametrize('grid, window, margin', LAYOUTS, ids=str)
both_ways = pytest.mark.parametrize('causal', [False, True], ids=['all', 'causal'])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def dense_mask(grid, window, margin, causal):
    places = list(itertools.product(*map(range, grid)))
    dims = len(grid)
    window = (window,) * dims if isinstance(window, int) else window
    margin = window if margin is None else margin
    margin = (margin,) * dims if isinstance(margin, int) else margin
    mask = torch.zeros(len(places), len(places), dtype=torch.bool)
    for t, target in enumerate(places):
        for s, source in enumerate(places):
            mask[t, s] = s <= t or not causal
            for place, other, size, extra in zip(target, source, window, margin, strict=True):
                block = range(place // size * size, place // size * size + size)
                distance = max(block[0] - other, other - block[-1], 0)
                if distance > extra:
                    mask[t, s] = False
    return mask


def dense_attention(mixer, x, mask):
    def heads(y):
        return y.unflatten(2, (HEADS, -1)).transpose(1, 2)

    parts = heads(mixer.query(x)), heads(mixer.key(x)), heads(mixer.value(x))
    mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask)
    return mixer.proj(mixed.transpose(1, 2).flatten(2))


def build(grid, window, margin, causal=True, **kwargs):
    options = dict(window=window, margin=margin, grid=grid, causal=causal)
    mixer = LocalSoftmaxAttention(D, HEADS, **{**options, **kwargs})
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer.double()


@both_ways
@every_layout
def test_equals_dense_attention_under_its_mask(grid, window, margin, causal):
    mixer = build(grid, window, margin, causal)
    tokens = torch.Size(grid).numel()
    x = torch.randn(2, tokens, D, dtype=torch.float64, requires_grad=True)
    mask = dense_mask(grid, window, margin, causal)
    got, expected = mixer(x), dense_attention(mixer, x, mask)
    torch.testing.assert_close(got, expected)
    inputs = [x, *mixer.parameters()]
    cotangent = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, inputs, cotangent),
        torch.autograd.grad(expected, inputs, cotangent),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@both_ways
@every_layout
def test_key_masks_equal_those_of_dense_attention(grid, window, margin, causal):
    mixer = build(grid, window, margin, causal)
    tokens = torch.Size(grid).numel()
    x = torch.randn(3, tokens, D, dtype=torch.float64)
    key_mask = torch.rand(3, tokens) < 0.6
    key_mask[1] = True
    visible = dense_mask(grid, window, margin, causal) & key_mask[:, None]
    some = visible.any(-1)
    zeroed = x.masked_fill(~key_mask[..., None], 0)
    expected = dense_attention(mixer, zeroed, visible[:, None] | ~some[:, None, :, None])
    expected = torch.where(some[..., None], expected, mixer.proj.bias)
    x[~key_mask] = torch.nan
    torch.testing.assert_close(mixer(x, key_mask=key_mask), expected)


@pytest.mark.parametrize('lengths', [None, (0, 5), (20, 11), (1, 37)], ids=str)
@pytest.mark.parametrize(
    'grid, window, margin', [((70,), 6, 4), ((9, 7), (2, 3), (1, 2)), ((7, 6), 2, 0)], ids=str
)
def test_steps_equal_the_forward_after_the_buffer_wraps(grid, window, margin, lengths):
    mixer = build(grid, window, margin)
    tokens = torch.Size(grid).numel()
    x = torch.randn(2, tokens, D, dtype=torch.float64)
    expected = mixer(x)
    if lengths is None:
        lengths, state = torch.zeros(2, dtype=torch.long), mixer.init_state(2)
    else:
        lengths = torch.tensor(lengths)
        y, state = mixer.prefill(x[:, : lengths.max()], lengths)
        given = torch.arange(y.shape[1]) < lengths[:, None]
        torch.testing.assert_close(y[given], expected[:, : lengths.max()][given])
    assert state.keys.shape[1] < tokens
    each = torch.arange(2)
    for n in range(tokens - int(lengths.max())):
        y_t, state = mixer.step(x[each, lengths + n], state)
        torch.testing.assert_close(y_t, expected[each, lengths + n])


@both_ways
def test_one_block_is_softmax_attention(causal):
    mixer = build((9,), 9, 0, causal)
    full = SoftmaxAttention(D, HEADS, causal=causal).double()
    full.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 9, D, dtype=torch.float64)
    torch.testing.assert_close(mixer(x), full(x))


def test_a_sequence_needs_no_grid_and_an_image_may_have_another():
    mixer, free = build((8,), 3, 2), build(None, 3, 2)
    free.load_state_dict(mixer.state_dict())
    x = torch.randn(2, 20, D, dtype=torch.float64)
    torch.testing.assert_close(mixer(x), free(x))
    small, large = build((4, 5), (2, 3), None), build((5, 4), (2, 3), None)
    large.load_state_dict(small.state_dict())
    torch.testing.assert_close(small(x, grid=(5, 4)), large(x))


@both_ways
@pytest.mark.parametrize('two_dimensional', [False, True])
def test_memory_is_linear_in_the_tokens(two_dimensional, causal):
    def saved(tokens):
        if two_dimensional:
            mixer = build((tokens // 16, 16), (4, 4), None, causal)
        else:
            mixer = build((tokens,), 16, None, causal)
        sizes = {}

        def pack(tensor):
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            mixer(torch.randn(1, tokens, D, dtype=torch.float64))
        return sum(sizes.values())

    assert saved(2048) < 2.2 * saved(1024)
