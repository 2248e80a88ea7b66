"""The contract of token mixers, tested for every registered one, and their options."""

import pytest
import torch
from torch import nn

from ..errors import refuses
from .mixer_cases import CONTRACTS, MIXERS, build, check_steps, mixer_class, tokens

globals().update({tests.__name__: tests for tests in CONTRACTS.values()})


@pytest.mark.parametrize(
    'name, change',
    [
        ('AFTFull', dict(gate='relu')),
        ('AFTFull', dict(gate='none')),
        ('AFTFull', dict(causal=True)),
        ('AFTSimple', dict(key_function='relu')),
        ('AFTSimple', dict(key_function='relu2')),
        ('AFTLocal', dict(window=0)),
        ('AFTLocal', dict(window=(2, 1))),
        ('AFTLocalLearned', dict(window=1)),
        ('AFTLocalHard', dict(window=2)),
        ('AFTLocalHard', dict(causal=False)),
        ('AFTConv', dict(reparameterize=False)),
        ('AFTConv', dict(query=False)),
        ('AFTConv', dict(global_connectivity=False)),
        ('AFTConv', dict(sparsity='gumbel')),
        ('SoftmaxAttention', dict(causal=True)),
        ('SoftmaxAttention', dict(num_heads=2)),
        ('SoftmaxAttention', dict(qkv_bias=False)),
        ('LocalSoftmaxAttention', dict(window=1)),
        ('LocalSoftmaxAttention', dict(window=(2, 1))),
        ('LocalSoftmaxAttention', dict(margin=1)),
        ('LocalSoftmaxAttention', dict(margin=(0, 2))),
        ('LocalSoftmaxAttention', dict(causal=True)),
        ('LinearAttention', dict(feature_map='relu')),
        ('LinearAttention', dict(num_heads=2)),
        ('StridedAttention', dict(stride=2)),
        ('StridedAttention', dict(pattern='fixed', summary=1)),
        ('StridedAttention-fixed', dict(summary=1)),
        ('LSHAttention', dict(chunk_size=1)),
        ('Pooling', dict(kernel_size=5)),
        ('LSTM', dict(qkv_bias=False)),
        ('AFTConv', dict(qkv_bias=False)),
        ('AFTSimple', dict(proj_drop=0.5)),
    ],
    ids=str,
)
def test_each_option_changes_the_output(name, change):
    x, plain, changed = tokens((3, 5)), build(name, (3, 5)), build(name, (3, 5), **change)
    changed.load_state_dict(plain.state_dict(), strict=False)
    if 'proj_drop' not in change:  # dropout only acts in training
        plain.eval(), changed.eval()
    assert (plain(x) - changed(x)).abs().max() > 1e-3


STEPS = [name for name in MIXERS if mixer_class(name).can_be_causal and build(name).has_steps]


@pytest.mark.parametrize('name', STEPS)
def test_steps_with_another_output_layer(name):
    """As adapters and quantization replace it."""
    mixer, x = build(name, causal=True).double().eval(), tokens((7,)).double()
    expected = mixer(x)
    mixer.proj = nn.Sequential(mixer.proj)
    torch.testing.assert_close(mixer(x), expected)
    check_steps(mixer, x)
    mixer.proj = nn.Identity()  # without a tensor, as a quantized layer
    check_steps(mixer, x)


def test_rows_of_a_state():
    mixer = build('AFTSimple', causal=True)
    state = mixer.init_state(2)
    for dtype in (torch.int64, torch.int32):
        rows = torch.tensor([1, 1, 0], dtype=dtype)
        assert mixer.select_state(state, rows).position.shape == (3,)
    for rows in (torch.tensor([True, False]), [0, 0], torch.tensor(0)):
        refuses(
            r'rows must be an int64 or int32 tensor \[N\] .* got', mixer.select_state, state, rows
        )


@pytest.mark.parametrize('name', ['AFTFull', 'AFTFull-free', 'AFTLocal', 'AFTLocalLearned'])
def test_another_grid_interpolates_the_bias(name):
    mixer, x = build(name, (3, 5)), tokens((6, 10))
    other = build(name, (6, 10))
    state = mixer.state_dict()
    other.load_state_dict(state)
    torch.testing.assert_close(mixer(x, grid=(6, 10)), other(x))
    torch.testing.assert_close(mixer.state_dict(), state)
