"""Softmax attention in local blocks against attention with a dense mask."""

import itertools

import pytest
import torch

from aft_mm.layers import LocalSoftmaxAttention

from ..helpers import each
from .dense_attention import HEADS, D, assert_is_dense_attention, randomize, saved_bytes
from .mixer_cases import check_steps

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


def build(grid, window, margin, causal=True, **kwargs):
    options = dict(window=window, margin=margin, grid=grid, causal=causal)
    return randomize(LocalSoftmaxAttention(D, HEADS, **{**options, **kwargs}))


@each('masked', [False, True])
@both_ways
@every_layout
def test_equals_dense_attention_under_its_mask(grid, window, margin, causal, masked):
    mask = dense_mask(grid, window, margin, causal)
    assert_is_dense_attention(build(grid, window, margin, causal), mask, masked)


@pytest.mark.parametrize('lengths', [None, (0, 5), (20, 11), (1, 37)], ids=str)
@pytest.mark.parametrize(
    'grid, window, margin', [((70,), 6, 4), ((9, 7), (2, 3), (1, 2)), ((7, 6), 2, 0)], ids=str
)
def test_steps_equal_the_forward_after_the_buffer_wraps(grid, window, margin, lengths):
    tokens = torch.Size(grid).numel()
    x = torch.randn(2, tokens, D, dtype=torch.float64)
    state = check_steps(build(grid, window, margin), x, lengths)
    assert state.keys.shape[1] < tokens


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
        layout = ((tokens // 16, 16), (4, 4)) if two_dimensional else ((tokens,), 16)
        return saved_bytes(build(*layout, None, causal), tokens)

    assert saved(2048) < 2.2 * saved(1024)
