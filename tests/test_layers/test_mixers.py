"""What every token mixer obeys: one table of mixers, every property of DESIGN §3 for each."""

import math

import pytest
import torch
from torch import nn

from aft_mm.layers import TokenMixer
from aft_mm.registry import MODELS

D, B = 12, 2
MIXERS = {
    'AFTFull': dict(rank=5),
    'AFTFull-free': dict(rank=None),
    'AFTLocal': dict(window=2, rank=5),
    'AFTLocal-free': dict(window=2, rank=None),
    'AFTLocalNormalized': dict(window=2, rank=5),
    'AFTLocalNormalized-free': dict(window=2, rank=None),
    'AFTSimple': dict(),
    'AFTSimple-relu': dict(key_function='relu'),
    'AFTSimple-relu2': dict(key_function='relu2'),
    'AFTConv': dict(num_heads=4, kernel_size=3),
    'AFTConv-no-query': dict(num_heads=12, kernel_size=3, query=False),
    'AFTConv-degenerate': dict(num_heads=1, kernel_size=5, global_connectivity=False),
    'AFTConv-naive': dict(num_heads=6, kernel_size=3, reparameterize=False),
    'AFTWindow': dict(window=4),
    'SoftmaxAttention': dict(num_heads=3),
    'LocalSoftmaxAttention': dict(num_heads=3, window=2),
    'LocalSoftmaxAttention-margin': dict(num_heads=4, window=3, margin=1),
}
GRIDS = [(1,), (7,), (3, 5), (6, 1)]
UNNORMALISED = (
    'AFTSimple-relu',
    'AFTSimple-relu2',
    'AFTLocalNormalized',
    'AFTLocalNormalized-free',
)
ONE_DIMENSIONAL = ('AFTLocal-free', 'AFTLocalNormalized-free')

every_mixer = pytest.mark.parametrize('name', MIXERS)
every_grid = pytest.mark.parametrize('grid', GRIDS, ids=str)
both_ways = pytest.mark.parametrize('causal', [False, True], ids=['all', 'causal'])


def build(name: str, grid=(7,), **kwargs) -> TokenMixer:
    """A mixer whose parameters are all random, so that none hides behind a zero."""
    if name in ONE_DIMENSIONAL:  # the raster of the grid
        grid = (torch.Size(grid).numel(),)
    config = dict(type='aft_mm.' + name.partition('-')[0], embed_dims=D, grid=grid)
    mixer = MODELS.build({**config, **MIXERS[name], **kwargs})
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer


def tokens(grid) -> torch.Tensor:
    return torch.randn(B, torch.Size(grid).numel(), D)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_the_table_holds_every_registered_mixer():
    MODELS.import_from_location()
    # Benchmarks register mixers of their own.
    own = [c for c in MODELS.module_dict.values() if c.__module__.startswith('aft_mm.')]
    classes = [c for c in own if issubclass(c, TokenMixer)]
    assert {c.__name__ for c in classes} == {name.partition('-')[0] for name in MIXERS}


@both_ways
@every_grid
@every_mixer
def test_shapes_and_gradients(name, grid, causal):
    mixer = build(name, grid, causal=causal)
    x = tokens(grid).requires_grad_()
    y = mixer(x)
    assert y.shape == x.shape
    bias = mixer.position_bias()
    if name.startswith(('AFTFull', 'AFTLocal')):
        assert bias.shape == (1, x.shape[1], x.shape[1])
    elif name.startswith('AFTConv'):
        assert bias.shape == mixer.pos_bias.weight.shape
    else:
        assert bias is None
    (y * torch.randn_like(y)).sum().backward()
    for path, parameter in mixer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path
        # A constant added to all keys, or to a whole row of w, cancels in the quotient.
        cancels = path == 'key.bias' or (path == 'pos_bias.beta' and 'degenerate' in name)
        if len(grid) == 2 and 1 not in grid and not cancels:
            assert parameter.grad.abs().max() > 1e-6, path


@every_grid
@every_mixer
def test_a_causal_mixer_never_sees_a_later_token(name, grid):
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


@both_ways
@every_grid
@pytest.mark.parametrize('name', [name for name in MIXERS if name not in UNNORMALISED])
def test_constant_values_come_out_as_they_are(name, grid, causal):
    mixer = build(name, grid, causal=causal)
    nn.init.zeros_(mixer.value.weight)
    x = tokens(grid)
    gated = hasattr(mixer, 'gate') and mixer.gate == 'sigmoid'
    gate = mixer.query(x).sigmoid() if gated else torch.ones_like(x)
    torch.testing.assert_close(mixer(x), mixer.proj(gate * mixer.value.bias))


@every_grid
@every_mixer
def test_steps_equal_the_parallel_forward(name, grid):
    mixer = build(name, grid, causal=True).eval()
    x = tokens(grid)
    state = mixer.init_state(B)
    rows = []
    for t in range(x.shape[1]):
        y_t, state = mixer.step(x[:, t], state)
        rows.append(y_t)
        assert (state.position == t + 1).all()
    torch.testing.assert_close(torch.stack(rows, dim=1), mixer(x), atol=1e-5, rtol=1e-4)


@every_mixer
def test_steps_of_a_float64_model_are_float64(name):
    mixer, x = build(name, (3, 5), causal=True).double().eval(), tokens((3, 5)).double()
    state, expected = mixer.init_state(B), mixer(x)
    for t in range(x.shape[1]):
        y_t, state = mixer.step(x[:, t], state)
        torch.testing.assert_close(y_t, expected[:, t], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize('lengths', [(0, 3), (1, 1), (6, 2)], ids=str)
@every_grid
@every_mixer
def test_steps_go_on_after_prompts_of_different_lengths(name, grid, lengths):
    mixer = build(name, grid, causal=True).eval()
    x = tokens(grid)
    expected = mixer(x)
    lengths = torch.tensor(lengths).clamp_max(x.shape[1] - 1)
    prompt = int(lengths.max()) or 1
    given = torch.arange(prompt) < lengths[:, None]
    y, state = mixer.prefill(x[:, :prompt].masked_fill(~given[..., None], torch.nan), lengths)
    close = dict(atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(y[given], expected[:, :prompt][given], **close)
    each = torch.arange(B)
    for n in range(x.shape[1] - prompt):
        y_t, state = mixer.step(x[each, lengths + n], state)
        torch.testing.assert_close(y_t, expected[each, lengths + n], **close)
        assert (state.position == lengths + n + 1).all()


@both_ways
@every_mixer
def test_padding_counts_as_absent(name, causal):
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
    assert all(p.grad.isfinite().all() for p in mixer.parameters())


@both_ways
@every_mixer
def test_a_row_that_sees_nothing_gives_zero(name, causal):
    mixer = build(name, causal=causal)
    x = torch.full((1, 7, D), torch.inf, requires_grad=True)
    y = mixer(x, key_mask=torch.zeros(1, 7, dtype=torch.bool))
    torch.testing.assert_close(y, mixer.proj.bias.expand_as(y))
    y.sum().backward()
    assert (x.grad == 0).all()


@both_ways
@every_mixer
def test_bfloat16_and_autocast(name, causal):
    mixer, x = build(name, (3, 5), causal=causal), tokens((3, 5))
    expected = mixer(x)
    with torch.autocast('cpu', torch.bfloat16):
        mixed = mixer(x)
        stepped, _ = mixer.step(x[:, 0], mixer.init_state(B)) if causal else (mixed[:, 0], None)
    assert mixed.dtype == stepped.dtype == torch.bfloat16
    torch.testing.assert_close(stepped, mixed[:, 0])
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
        ('AFTLocalNormalized', dict(window=1)),
        ('AFTWindow', dict(window=2)),
        ('AFTWindow', dict(causal=False)),
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
        ('AFTConv', dict(qkv_bias=False)),
        ('AFTSimple', dict(proj_drop=0.5)),
    ],
    ids=str,
)
def test_each_option_changes_the_output(name, change):
    x, plain, changed = tokens((3, 5)), build(name, (3, 5)), build(name, (3, 5), **change)
    changed.load_state_dict(plain.state_dict(), strict=False)
    if 'proj_drop' not in change:  # else chance alone would tell the two apart
        plain.eval(), changed.eval()
    assert (plain(x) - changed(x)).abs().max() > 1e-3


@pytest.mark.parametrize('name', ['AFTFull', 'AFTFull-free', 'AFTSimple', 'SoftmaxAttention'])
def test_memory_gives_keys_and_values(name):
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


@pytest.mark.parametrize('name', ['AFTFull', 'AFTFull-free', 'AFTSimple', 'SoftmaxAttention'])
def test_prefix_tokens_stand_in_front_of_the_grid(name):
    mixer = build(name, (3, 5), num_prefix_tokens=1)
    x = torch.randn(B, 16, D)
    assert mixer(x).shape == x.shape
    assert mixer(torch.randn(B, 25, D), grid=(4, 6)).shape == (B, 25, D)
    with pytest.raises(ValueError, match='1 prefix tokens does not hold 15 tokens'):
        mixer(x[:, 1:])


@pytest.mark.parametrize('name', ['AFTFull', 'AFTFull-free', 'AFTLocal', 'AFTLocalNormalized'])
def test_another_grid_interpolates_the_bias(name):
    mixer, x = build(name, (3, 5)), tokens((6, 10))
    other = build(name, (6, 10))
    state = mixer.state_dict()
    other.load_state_dict(state)
    torch.testing.assert_close(mixer(x, grid=(6, 10)), other(x))
    torch.testing.assert_close(mixer.state_dict(), state)


@pytest.mark.parametrize(
    'config, message',
    [
        (dict(type='AFTFull', rank=0), 'rank must be .*, got 0'),
        (dict(type='AFTFull', grid=None), 'grid must be given for AFTFull, .* got None'),
        (dict(type='AFTFull', grid=(0, 3)), r'grid must be .* ints, 1 or larger, got \(0, 3\)'),
        (dict(type='AFTFull', grid=(2, 2, 2, 2)), 'grid must be .* ints, 1 or larger'),
        (dict(type='AFTFull', gate='tanh'), "gate must be one of sigmoid, .* got 'tanh'"),
        (dict(type='AFTFull', num_prefix_tokens=-1), 'must be an int, 0 or larger'),
        (dict(type='AFTFull', embed_dims=0), 'embed_dims must be an int, 1 or larger, got 0'),
        (dict(type='AFTSimple', key_function='exp'), "key_function must be one .* got 'exp'"),
        (
            dict(type='AFTSimple', key_function='relu2', gate='sigmoid'),
            "gate must be 'relu' for key_function='relu2', got 'sigmoid'",
        ),
        (dict(type='AFTLocal', window=-1), 'window must be .* ints, 0 or larger, got -1'),
        (dict(type='AFTLocal', window=(1, 2, 3)), 'window must be an int or 2 ints'),
        (dict(type='AFTLocal', window=1, rank=None), r'1 dimension for a free .* got \(3, 4\)'),
        (dict(type='AFTLocal', window=0, rank=None, grid=(4,)), 'window must be 1 or .* got 0'),
        (dict(type='AFTLocal', window=1, rank=0), 'rank must be .*, got 0'),
        (dict(type='AFTLocal', window=1, grid=None), 'grid must have 1 or 2 dimensions .* None'),
        (dict(type='AFTLocal', window=1, num_prefix_tokens=1), 'must be 0 for AFTLocal, got 1'),
        (dict(type='AFTLocalNormalized', window=-1), 'window must be .* ints, 0 or larger, got -1'),
        (dict(type='AFTWindow', window=3), 'window must be even .* got 3'),
        (dict(type='AFTWindow', window=2.5), r'window must be an int or .* got 2.5'),
        (dict(type='AFTLocal', window=True), r'window must be an int or .* got True'),
        (dict(type='AFTWindow', window=0, grid=(4,)), 'window must be an int, 1 or larger, got 0'),
        (dict(type='LocalSoftmaxAttention', num_heads=5, window=2), 'divides embed_dims=12, got 5'),
        (dict(type='LocalSoftmaxAttention', num_heads=3, window=0), 'window must be .* 1 or .* 0'),
        (
            dict(type='LocalSoftmaxAttention', num_heads=3, window=(2, 2), grid=(9,)),
            r'window must be .*1 or larger, got \(2, 2\)',
        ),
        (
            dict(type='LocalSoftmaxAttention', num_heads=3, window=2, margin=(1, -1)),
            r'margin must be .* ints, 0 or larger, got \(1, -1\)',
        ),
        (
            dict(type='LocalSoftmaxAttention', num_heads=3, window=2, grid=(2, 2, 2)),
            'grid must have 1 or 2 dimensions for LocalSoftmaxAttention',
        ),
        (dict(type='AFTConv', num_heads=5, kernel_size=3), 'divides embed_dims=12, got 5'),
        (dict(type='AFTConv', num_heads=4, kernel_size=4), r'must be odd, got \(4, 4\)'),
        (dict(type='AFTConv', num_heads=4, kernel_size=(3,)), r'or 2 ints, .* got \(3,\)'),
        (
            dict(type='AFTConv', num_heads=4, kernel_size=3, sparsity='l1'),
            "sparsity must be one of none, entropy, gumbel, got 'l1'",
        ),
        *[
            (
                dict(type='AFTConv', num_heads=4, kernel_size=3, sparsity='gumbel', tau=tau),
                f'tau must be a finite number above 0, got {tau!r}',
            )
            for tau in (0, -0.5, math.inf, math.nan, 'soft')
        ],
        *[
            (
                dict(type='AFTConv', num_heads=4, kernel_size=3, sparsity=sparsity, tau=0.5),
                f"tau must be left at its default with sparsity='{sparsity}', got 0.5",
            )
            for sparsity in ('none', 'entropy')
        ],
        (
            dict(type='AFTConv', num_heads=4, kernel_size=3, num_prefix_tokens=1),
            'num_prefix_tokens must be 0 for AFTConv, got 1',
        ),
        (dict(type='SoftmaxAttention', num_heads=5), 'divides embed_dims=12, got 5'),
    ],
    ids=str,
)
def test_bad_arguments_end_in_one_sentence(config, message):
    config = {'embed_dims': D, 'grid': (3, 4), **config, 'type': 'aft_mm.' + config['type']}
    with pytest.raises(ValueError, match=message) as error:
        MODELS.build(config)
    assert '\n' not in str(error.value)


@every_mixer
def test_an_unknown_argument_is_named(name):
    with pytest.raises(TypeError, match=r"has no argument 'widnow', only embed_dims, .*grid"):
        build(name, widnow=3)


@pytest.mark.parametrize('name', ['AFTLocal', 'AFTLocalNormalized', 'AFTConv', 'AFTWindow'])
def test_bad_inputs_end_in_one_sentence(name):
    mixer, x = build(name, (3, 5), causal=False), tokens((3, 5))
    with pytest.raises(ValueError, match=r'grid \(3, 5\) .* does not hold 14 tokens'):
        mixer(x[:, 1:])
    with pytest.raises(ValueError, match=r'grid \(2, 7\) .* does not hold 15 tokens'):
        mixer(x, grid=(2, 7))
    with pytest.raises(ValueError, match=r'key_mask must be bool \[2, 15\] .*float32 \[2, 14\]'):
        mixer(x, key_mask=torch.ones(2, 14))
    with pytest.raises(ValueError, match=r'memory must be None for AFT\w+ .* got \[2, 15, 12\]'):
        mixer(x, memory=x)
    with pytest.raises(ValueError, match='init_state needs .* got causal=False'):
        mixer.init_state(1)


def test_memory_is_refused_where_it_has_no_meaning():
    x = tokens((7,))
    with pytest.raises(ValueError, match='memory must be None for AFTSimple with causal=True'):
        build('AFTSimple', causal=True)(x, memory=x)
    with pytest.raises(ValueError, match='memory must be None for AFTSimple'):
        build('AFTSimple', gate='none')(x, memory=x)
    with pytest.raises(ValueError, match=r'grid \(8,\) does not fit positions learned on .*\(7,\)'):
        build('AFTFull')(torch.randn(1, 8, D))
    with pytest.raises(ValueError, match='grid must be given to AFTConv for init_state, got None'):
        build('AFTConv', grid=None, causal=True).init_state(1)
    with pytest.raises(ValueError, match=r'lengths must be \[2\], got \[3\]'):
        build('SoftmaxAttention', causal=True).prefill(x, torch.tensor([1, 2, 3]))
