"""Softmax attention against torch's MultiheadAttention, and its key-value cache."""

import pytest
import torch
from torch import nn

from .mixer_cases import D, build


@pytest.mark.parametrize('causal', [False, True], ids=['all', 'causal'])
def test_softmax_attention_equals_torch(causal):
    mixer, x = build('SoftmaxAttention', None, causal=causal), torch.randn(2, 7, D)
    oracle = nn.MultiheadAttention(D, 3, batch_first=True)
    for part in ('weight', 'bias'):
        names = ('query', 'key', 'value')
        joined = torch.cat([getattr(getattr(mixer, name), part) for name in names])
        getattr(oracle, f'in_proj_{part}').data = joined.detach()
    oracle.out_proj.load_state_dict(mixer.proj.state_dict())
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    expected, _ = oracle(x, x, x, key_padding_mask=~mask, attn_mask=hidden)
    y = mixer(x, key_mask=mask)
    torch.testing.assert_close(y[0], expected[0])
    torch.testing.assert_close(y[1, :4], expected[1, :4])


def test_the_cache_grows_more_than_once():
    mixer = build('SoftmaxAttention', None, causal=True)
    x, lengths, each = torch.randn(2, 140, D), torch.tensor([3, 40]), torch.arange(2)
    expected = mixer(x)
    _, state = mixer.prefill(x[:, :40], lengths)
    rooms = {state.key.shape[2]}
    for n in range(100):
        y_t, state = mixer.step(x[each, lengths + n], state)
        torch.testing.assert_close(y_t, expected[each, lengths + n], atol=1e-5, rtol=1e-4)
        rooms.add(state.key.shape[2])
    assert len(rooms) == 3
