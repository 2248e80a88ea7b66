"""The contract of token mixers, tested for every registered one."""

import pytest
import torch
from torch import nn

from ..helpers import each
from .mixer_cases import (
    CAUSAL,
    GRIDS,
    MIXERS,
    NORMALIZED,
    ONE_DIMENSIONAL,
    STEPPED,
    B,
    D,
    build,
    check_steps,
    mixer_class,
    tokens,
)

WITH_MEMORY = [name for name in MIXERS if mixer_class(name).takes_memory]
WITH_PREFIX_TOKENS = [
    name for name in MIXERS if mixer_class(name).takes_prefix_tokens and name not in ONE_DIMENSIONAL
]
every_causal_mixer = pytest.mark.parametrize('name', CAUSAL)
every_stepped_mixer = pytest.mark.parametrize('name', STEPPED)
every_grid = each('grid', GRIDS)
# A mixer, and whether it is causal.
WAYS = [(name, False) for name in MIXERS] + [(name, True) for name in CAUSAL]
way_ids = {False: 'all', True: 'causal'}
both_ways = pytest.mark.parametrize('name, causal', WAYS, ids=lambda x: way_ids.get(x, x))
normalised_both_ways = pytest.mark.parametrize(
    'name, causal', [way for way in WAYS if way[0] in NORMALIZED], ids=lambda x: way_ids.get(x, x)
)


@both_ways
@every_grid
def test_output_has_the_input_shape_and_every_parameter_gets_a_gradient(name, grid, causal):
    mixer = build(name, grid, causal=causal)
    x = tokens(grid).requires_grad_()
    y = mixer(x)
    assert y.shape == x.shape
    bias = mixer.position_bias()
    if name.startswith('AFTConv'):
        assert bias.shape == mixer.pos_bias.weight.shape
    elif name == 'AFTFull-log':
        assert bias.shape == (3, 2 * x.shape[1] - 1)
    else:
        assert bias is None or bias.shape == (1, x.shape[1], x.shape[1])
    (y * torch.randn_like(y)).sum().backward()
    for path, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path
        # A constant added to all keys, or to a whole row of w, cancels in the quotient.
        cancels = path in ('key.bias', 'key_norm.bias')
        cancels |= path == 'pos_bias.beta' and 'degenerate' in name
        if len(grid) == 2 and 1 not in grid and not cancels:
            assert parameter.grad.abs().max() > 1e-6, path


@every_grid
@every_causal_mixer
def test_causal_outputs_do_not_depend_on_later_tokens(name, grid):
    mixer = build(name, grid, causal=True)
    x = tokens(grid).requires_grad_()
    t = x.shape[1] // 2
    y = mixer(x)
    (gradient,) = torch.autograd.grad(y[:, : t + 1].square().sum(), x)
    assert (gradient[:, t + 1 :] == 0).all()
    assert (gradient[:, t] != 0).any()
    changed = x.detach().clone()
    changed[:, t + 1 :] += 1e4
    torch.testing.assert_close(mixer(changed)[:, : t + 1], y[:, : t + 1])


@normalised_both_ways
@every_grid
def test_weights_sum_to_one(name, grid, causal):
    mixer = build(name, grid, causal=causal)
    nn.init.zeros_(mixer.value.weight)
    x = tokens(grid)
    gated = hasattr(mixer, 'gate') and mixer.gate == 'sigmoid'
    gate = mixer.query(x).sigmoid() if gated else torch.ones_like(x)
    torch.testing.assert_close(mixer(x), mixer.proj(gate * mixer.value.bias))


@each('lengths', [None, (0, 3), (1, 1), (6, 2)])
@every_grid
@every_stepped_mixer
def test_steps_equal_the_parallel_forward(name, grid, lengths):
    """Also after prompts of different lengths."""
    mixer = build(name, grid, causal=True).eval()
    check_steps(mixer, tokens(grid), lengths, atol=1e-5, rtol=1e-4)


@every_stepped_mixer
def test_steps_of_a_float64_model_are_float64(name):
    mixer, x = build(name, (3, 5), causal=True).double().eval(), tokens((3, 5)).double()
    check_steps(mixer, x, atol=1e-12, rtol=1e-10)


@both_ways
def test_padding_has_no_influence_and_no_gradient(name, causal):
    mixer = build(name, (9,), causal=causal)
    short = torch.randn(1, 6, D)
    padded = torch.full((1, 9, D), torch.nan)
    padded[:, :6] = short
    padded.requires_grad_()
    mask = torch.arange(9)[None] < 6
    y = mixer(padded, key_mask=mask)[:, :6]
    torch.testing.assert_close(y, mixer(short))
    y.square().sum().backward()
    assert (padded.grad[:, 6:] == 0).all()
    for path, parameter in mixer.named_parameters():
        assert parameter.grad.isfinite().all(), path


@both_ways
def test_an_empty_batch_stays_empty(name, causal):
    mixer, x = build(name, causal=causal).eval(), torch.zeros(0, 7, D)
    for mask in (None, torch.zeros(0, 7, dtype=torch.bool)):
        assert mixer(x, key_mask=mask).shape == x.shape
    if causal and name in STEPPED:
        y, state = mixer.prefill(x[:, :3], torch.zeros(0, dtype=torch.long))
        assert y.shape == (0, 3, D)
        assert mixer.step(x[:, 3], state)[0].shape == (0, D)


@both_ways
def test_a_token_that_sees_no_token_gets_zero(name, causal):
    mixer = build(name, causal=causal)
    x = torch.full((1, 7, D), torch.inf, requires_grad=True)
    y = mixer(x, key_mask=torch.zeros(1, 7, dtype=torch.bool))
    torch.testing.assert_close(y, mixer.proj.bias.expand_as(y))
    y.sum().backward()
    assert (x.grad == 0).all()


@both_ways
def test_bfloat16_and_autocast_are_close_to_float32(name, causal):
    mixer, x = build(name, (3, 5), causal=causal), tokens((3, 5))
    expected = mixer(x)
    with torch.autocast('cpu', torch.bfloat16):
        mixed = mixer(x)
        stepped = mixed[:, 0]
        if causal and mixer.has_steps:
            stepped, _ = mixer.step(x[:, 0], mixer.init_state(B))
    assert mixed.dtype == stepped.dtype == torch.bfloat16
    # The two paths of the LSTM sum in another order, which may round to the next bfloat16.
    atol = float(mixed.detach().abs().max()) * 2**-8 if name == 'LSTM' else 1e-5
    torch.testing.assert_close(stepped, mixed[:, 0], rtol=0.016, atol=atol)
    low = mixer.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    for y in (mixed, low):
        assert (y.float() - expected).norm() < 0.05 * expected.norm()


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


@pytest.mark.parametrize('name', WITH_MEMORY)
def test_keys_and_values_come_from_the_memory(name):
    mixer, x = build(name), tokens((7,))
    torch.testing.assert_close(mixer(x, memory=x), mixer(x))
    memory = torch.randn(B, 4, D)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    y = mixer(x, memory=memory.masked_fill(~mask[..., None], torch.nan), key_mask=mask)
    torch.testing.assert_close(y[:1], mixer(x[:1], memory=memory[:1]))
    torch.testing.assert_close(y[1:], mixer(x[1:], memory=memory[1:, :2]))
    assert (y[0] - mixer(x[:1], memory=memory[1:])[0]).abs().max() > 1e-3
    projected = mixer.project_memory(memory, mask)
    torch.testing.assert_close(mixer(x, memory=projected), y)
    with pytest.raises(ValueError, match='key_mask must be None for a projected memory'):
        mixer(x, memory=projected, key_mask=mask)


@pytest.mark.parametrize('name', WITH_PREFIX_TOKENS)
def test_prefix_tokens_precede_the_grid(name):
    mixer = build(name, (3, 5), num_prefix_tokens=1)
    x = torch.randn(B, 16, D)
    assert mixer(x).shape == x.shape
    assert mixer(torch.randn(B, 25, D), grid=(4, 6)).shape == (B, 25, D)
    with pytest.raises(
        ValueError, match=r'grid must hold 15 tokens with 1 prefix tokens, got \(3, 5\)'
    ):
        mixer(x[:, 1:])


@pytest.mark.parametrize('name', ['AFTFull', 'AFTFull-free', 'AFTLocal', 'AFTLocalLearned'])
def test_another_grid_interpolates_the_bias(name):
    mixer, x = build(name, (3, 5)), tokens((6, 10))
    other = build(name, (6, 10))
    state = mixer.state_dict()
    other.load_state_dict(state)
    torch.testing.assert_close(mixer(x, grid=(6, 10)), other(x))
    torch.testing.assert_close(mixer.state_dict(), state)
