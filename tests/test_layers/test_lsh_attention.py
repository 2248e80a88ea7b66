"""LSH attention against exact shared-QK attention, in full and with the mask of its rounds."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aft_mm.layers import LSHAttention

from .dense_attention import HEADS, D, assert_same_gradients, heads, joined, randomize
from .mixer_cases import check_steps

both_ways = pytest.mark.parametrize('causal', [False, True], ids=['all', 'causal'])


def build(causal=True, grid=(60,), **kwargs) -> LSHAttention:
    return randomize(LSHAttention(D, HEADS, causal=causal, grid=grid, **kwargs))


def exact_weights(mixer, x, visible):
    key = heads(mixer.key(x))
    logits = key @ F.normalize(key, dim=-1).mT * key.shape[-1] ** -0.5
    itself = torch.eye(x.shape[1], dtype=torch.bool)
    others = (visible & ~itself).any(-1, keepdim=True)
    visible = torch.where(others, visible & ~itself, visible)
    weights = logits.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.nan_to_num(0)  # a row that sees nothing


def output(mixer, x, weights):
    return mixer.proj(joined(weights @ heads(mixer.value(x))))


def seen(mixer, x, key_mask=None):
    """Return the visible tokens of all rounds, [B, h, T, T]."""
    buckets = mixer.buckets(heads(mixer.key(x)))
    batch, num_heads, _, tokens = buckets.shape
    buckets = buckets.tolist()
    union = torch.zeros(batch, num_heads, tokens, tokens, dtype=torch.bool)
    for b in range(batch):
        real = range(tokens) if key_mask is None else key_mask[b].nonzero().flatten().tolist()
        for h in range(num_heads):
            for of_token in buckets[b][h]:
                order = sorted(real, key=lambda t: (of_token[t], t))
                for place, t in enumerate(order):
                    first = (place // mixer.chunk_size - 1) * mixer.chunk_size
                    last = first + 2 * mixer.chunk_size
                    if mixer.causal:
                        first, last = place - mixer.chunk_size, place + 1
                    for s in order[max(first, 0) : last]:
                        if of_token[s] == of_token[t]:
                            union[b, h, t, s] = True
    return union


@both_ways
@pytest.mark.parametrize('rounds', [1, 4, 8])
def test_one_bucket_is_exact_attention_with_shared_query_and_key(rounds, causal):
    mixer = build(causal, num_rounds=rounds, num_buckets=1, chunk_size=40)
    x = torch.randn(2, 37, D, dtype=torch.float64)
    visible = torch.ones(37, 37, dtype=torch.bool)
    expected = output(mixer, x, exact_weights(mixer, x, visible.tril() if causal else visible))
    torch.testing.assert_close(mixer(x), expected)


@pytest.mark.parametrize('masked', [False, True], ids=['all tokens', 'masked'])
@both_ways
@pytest.mark.parametrize(
    'options',
    [
        dict(num_rounds=1, num_buckets=4, chunk_size=3),
        dict(num_rounds=3, num_buckets=2, chunk_size=5),
        dict(num_rounds=2, num_buckets=8, chunk_size=100),
        dict(num_rounds=4, num_buckets=6, chunk_size=1),
    ],
    ids=str,
)
def test_equals_exact_attention_over_the_union_of_its_rounds(options, causal, masked):
    mixer = build(causal, **options)
    x = torch.randn(2, 41, D, dtype=torch.float64, requires_grad=True)
    key_mask = torch.rand(2, 41) < 0.7 if masked else None
    real = torch.ones(2, 41, dtype=torch.bool) if key_mask is None else key_mask
    visible = seen(mixer, x, key_mask)
    got, expected = mixer(x, key_mask=key_mask), output(mixer, x, exact_weights(mixer, x, visible))
    torch.testing.assert_close(got[real], expected[real])
    assert_same_gradients(got, expected, [x, *mixer.parameters()], real)


@pytest.mark.nightly
def test_more_rounds_recall_more_of_exact_attention():
    x, recall = torch.randn(1, 150, D, dtype=torch.float64), {}
    for rounds in (1, 4, 8):
        torch.manual_seed(0)
        mixer = build(num_rounds=rounds, num_buckets=16, chunk_size=32)
        nn.init.normal_(mixer.key.weight, std=3)  # long keys, whose weights prefer some tokens
        weights = exact_weights(mixer, x, torch.ones(150, 150, dtype=torch.bool).tril())
        union = seen(mixer, x)
        recall[rounds] = (weights * union).sum(-1)[:, :, 1:].mean().item()
        tokens = union.sum(-1) / torch.arange(1, 151)
        recall[rounds, 'chance'] = tokens[:, :, 1:].mean().item()
    assert recall[1] > 2.5 * recall[1, 'chance'] and recall[8] > 1.8 * recall[8, 'chance']
    assert recall[1] + 0.2 < recall[4] < recall[8] - 0.03 and recall[8] > 0.9


@pytest.mark.parametrize('lengths', [None, (0, 5), (59, 23), (40, 1)], ids=str)
def test_steps_equal_the_forward_after_buckets_overflow(lengths):
    mixer = build(num_rounds=3, num_buckets=4, chunk_size=4)
    x = torch.randn(2, 60, D, dtype=torch.float64)
    parts = [mixer.init_state(2), check_steps(mixer, x, lengths)]
    first, last = ([part.numel() for part in (*s.table.rows, s.recent)] for s in parts)
    assert first == last


def test_checkpoints_contain_the_rotations():
    options = dict(num_rounds=2, num_buckets=4, chunk_size=4)
    mixer, other = build(**options), build(**options)
    x = torch.randn(1, 50, D, dtype=torch.float64)
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(mixer(x), other(x))
