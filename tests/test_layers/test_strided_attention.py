"""Strided and fixed attention against attention with a dense mask."""

import pytest
import torch

from aft_mm.layers import StridedAttention

from ..helpers import each
from .dense_attention import HEADS, D, assert_is_dense_attention, randomize, saved_bytes
from .mixer_cases import check_steps

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


def build(tokens, causal, **options):
    return randomize(StridedAttention(D, HEADS, grid=(tokens,), causal=causal, **options))


def dense_mask(tokens, causal, stride, pattern='strided', summary=None, qk_dims=None):
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for t in range(tokens):
        for s in range(t + 1 if causal else tokens):
            if pattern == 'strided':
                mask[t, s] = abs(t - s) <= stride or (t - s) % stride == 0
            else:
                mask[t, s] = t // stride == s // stride or s % stride >= stride - summary
    return mask


@each('masked', [False, True])
@both_ways
@every_layout
def test_equals_dense_attention_under_its_mask(tokens, options, causal, masked):
    mask = dense_mask(tokens, causal, **options)
    assert_is_dense_attention(build(tokens, causal, **options), mask, masked)


@each('lengths', [None, (0, 5), (20, 11)])
@every_layout
def test_steps_equal_the_forward(tokens, options, lengths):
    x = torch.randn(2, tokens, D, dtype=torch.float64)
    check_steps(build(tokens, True, **options), x, lengths)


def test_memory_per_token_grows_with_the_root_of_the_tokens():
    def saved(tokens, stride):
        return saved_bytes(build(tokens, True, stride=stride), tokens) / tokens

    assert saved(4096, 64) < 2.2 * saved(1024, 32)
