"""Position biases: eq. 7 and 8, gradients, sparsity, and other grids."""

import copy
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from aft_mm.layers import AFTConv, AFTFull, AFTLocal
from aft_mm.layers.grid import infer_grid, interpolate
from aft_mm.layers.position_bias import (
    ConvPositionBias,
    FactorizedPositionBias,
    FreeLocalPositionBias,
    FreePositionBias,
    MemoryPositionBias,
)

from ..errors import refuses
from .mixer_cases import MIXERS, build, tokens


@pytest.mark.parametrize('kernel', [(1,), (5,), (3, 7), (3, 1, 5)], ids=str)
def test_reparameterisation_is_equation_8(kernel):
    bias = ConvPositionBias(4, kernel)
    nn.init.normal_(bias.gamma)
    nn.init.normal_(bias.beta)
    w = bias.weight.double().flatten(1)
    std = w.std(1, correction=0, keepdim=True) if w.shape[1] > 1 else 1
    expected = bias.gamma[:, None] * (w - w.mean(1, keepdim=True)) / std + bias.beta[:, None]
    torch.testing.assert_close(bias().flatten(1).double(), expected, atol=1e-5, rtol=1e-5)
    assert bias().shape == (4, *kernel)


def test_aft_conv_starts_as_aft_simple_and_then_learns_its_kernel():
    mixer = AFTConv(8, num_heads=4, kernel_size=3, grid=(4, 5))
    assert (mixer.position_bias() == 0).all()
    x, target = torch.randn(2, 20, 8), torch.randn(2, 20, 8)
    optimizer = torch.optim.SGD(mixer.parameters(), lr=1.0)
    bias = mixer.pos_bias

    def gradients():
        optimizer.zero_grad()
        (mixer(x) - target).square().mean().backward()
        return {name: p.grad.abs().max() for name, p in bias.named_parameters()}

    first = gradients()
    assert first['gamma'] > 0 and first['beta'] > 0 and first['weight'] == 0
    optimizer.step()
    assert (bias.gamma != 0).all()
    for name, gradient in gradients().items():
        assert gradient > 0, name


@pytest.mark.parametrize('std', [0.01, 0.3])
def test_init_std_is_the_initial_standard_deviation(std):
    grid = (9, 11)
    factors = FactorizedPositionBias(grid, 64, 1, std)
    conv = AFTConv(64, num_heads=32, kernel_size=11, grid=grid, init_std=std)
    started = [
        *factors(as_operands=True),
        FreePositionBias(grid, 1, std).weight,
        FreeLocalPositionBias((99,), 40, True, std).weight,
        AFTLocal(8, window=5, rank=64, grid=grid, init_std=std).pos_bias.pos_u,
        AFTLocal(8, window=40, rank=None, grid=(99,), init_std=std).pos_bias.weight,
        AFTFull(8, rank=64, grid=grid, init_std=std).pos_bias.pos_v,
        AFTFull(8, rank=None, grid=grid, init_std=std).pos_bias.weight,
        conv.pos_bias.weight,
    ]
    for parameter in started:
        assert parameter.std().item() == pytest.approx(std, rel=0.1)


def test_init_std_of_zero_is_refused_where_gradients_would_vanish():
    assert (FreePositionBias((5,), init_std=0).weight == 0).all()
    assert (FreeLocalPositionBias((5,), 2, True, init_std=0.0).weight == 0).all()
    assert (ConvPositionBias(2, (3,), reparameterize=False, init_std=0).weight == 0).all()
    message = 'init_std must be a finite number'
    refuses(message, FactorizedPositionBias, (5,), 2, init_std=0)
    refuses(message, ConvPositionBias, 2, (3,), init_std=0.0)
    refuses(message, AFTLocal, 8, window=2, grid=(5,), init_std=-0.1)
    refuses(message, AFTFull, 8, rank=None, grid=(5,), init_std=math.nan)
    refuses(message, AFTConv, 8, num_heads=2, kernel_size=3, init_std='small')
    options = dict(rank=None, grid=(4, 4), source_grid=(2, 2), init_std=0.1)
    refuses('init_std must be None with a source_grid', AFTFull, 8, **options)


def test_without_reparameterisation_the_bias_is_the_weight():
    bias = ConvPositionBias(4, (3, 3), reparameterize=False)
    assert bias() is not None and torch.equal(bias(), bias.weight)
    assert [name for name, _ in bias.named_parameters()] == ['weight']


def gumbel_mixer(**options) -> AFTConv:
    mixer = AFTConv(8, num_heads=4, kernel_size=3, grid=(4, 5), sparsity='gumbel', **options)
    nn.init.ones_(mixer.pos_bias.gamma)
    return mixer


def dense_bias(mixer: AFTConv) -> torch.Tensor:
    with mock.patch.object(mixer.pos_bias, 'tau', None):
        return mixer.pos_bias().flatten(1)


@pytest.mark.parametrize('tau', [None, 5.0])
def test_gumbel_selects_the_largest_bias_in_evaluation(tau):
    mixer = gumbel_mixer(tau=tau).eval()
    dense = dense_bias(mixer)
    sparse = mixer.position_bias().flatten(1)
    assert torch.equal((sparse != 0).sum(1), torch.ones(4, dtype=torch.long))
    torch.testing.assert_close(sparse.sum(1), dense.amax(1))
    x = torch.randn(2, 20, 8)
    assert torch.equal(mixer(x), mixer(x))
    assert torch.equal(mixer.train().position_bias().flatten(1), sparse)


def test_gumbel_samples_positions_in_training():
    mixer = gumbel_mixer()
    x = torch.randn(2, 20, 8)
    assert (mixer(x) - mixer(x)).abs().max() > 1e-4
    dense = dense_bias(mixer).detach()
    samples = torch.stack([mixer.pos_bias(sample=True).flatten(1) for _ in range(4000)])
    chosen = (samples / dense).detach()
    torch.testing.assert_close(chosen.sum(2), torch.ones(4000, 4))
    # The position of the largest entry of a Gumbel-softmax sample is a sample of softmax(w).
    counts = nn.functional.one_hot(chosen.argmax(2), 9).float().mean(0)
    torch.testing.assert_close(counts, dense.softmax(1), atol=0.03, rtol=0)
    samples.square().sum().backward()
    assert (mixer.pos_bias.weight.grad != 0).any() and (mixer.pos_bias.gamma.grad != 0).any()


@pytest.mark.parametrize('tau', [None, 0.5, 2.0, 1e-3])
def test_tau_is_the_temperature_of_the_samples(tau):
    """Compares with torch's Gumbel softmax with the same noise; None is the paper's 0.5."""
    mixer = gumbel_mixer(tau=tau)
    dense = dense_bias(mixer)
    torch.manual_seed(5)
    bias = mixer.pos_bias(sample=True).flatten(1)
    torch.manual_seed(5)
    chosen = nn.functional.gumbel_softmax(dense, tau=0.5 if tau is None else tau)
    torch.testing.assert_close(bias, dense * chosen)
    nearly_one_hot = chosen.amax(1).min() > 0.99
    assert nearly_one_hot == (tau == 1e-3)


def test_entropy_of_the_kernel_is_summed_over_the_heads():
    mixer = AFTConv(8, num_heads=4, kernel_size=3, grid=(4, 5), sparsity='entropy')
    torch.testing.assert_close(mixer.regularization_loss().item(), 4 * math.log(9))
    nn.init.normal_(mixer.pos_bias.gamma)
    nn.init.normal_(mixer.pos_bias.beta)
    oracle = torch.distributions.Categorical(logits=mixer.position_bias().flatten(1))
    loss = mixer.regularization_loss()
    torch.testing.assert_close(loss, oracle.entropy().sum())
    loss.backward()
    assert (mixer.pos_bias.weight.grad != 0).any() and (mixer.pos_bias.gamma.grad != 0).all()
    dense = AFTConv(8, num_heads=4, kernel_size=3, grid=(4, 5))
    assert dense.regularization_loss() is None


@pytest.mark.parametrize('rank', [3, None])
def test_factors_are_initialised_small_and_autocast_does_not_change_w(rank):
    mixer = AFTFull(8, rank=rank, grid=(12, 12))
    free_local = FreeLocalPositionBias((300,), 8, True)
    for parameter in (*mixer.pos_bias.parameters(), *(free_local.parameters() if not rank else ())):
        assert parameter.std().item() == pytest.approx(0.1 if rank else 0.01, rel=0.1)
    expected = mixer.position_bias()
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(mixer.position_bias(), expected)


@pytest.mark.parametrize('target', [(4, 6), (7, 5), (2, 3)], ids=str)
def test_interpolating_the_factors_interpolates_w(target):
    factors = FactorizedPositionBias((4, 6), rank=3, num_prefix_tokens=1)
    free = FreePositionBias((4, 6), num_prefix_tokens=1)
    free.weight.data = factors().detach()
    torch.testing.assert_close(factors(target), free(target))
    torch.testing.assert_close(factors((4, 6), target), free((4, 6), target))
    assert factors(target, (4, 6)).shape == (1 + target[0] * target[1], 25)


@pytest.mark.parametrize('causal', [False, True])
def test_a_free_local_bias_has_a_parameter_per_token_and_offset(causal):
    bias = FreeLocalPositionBias((9,), 3, causal)
    assert bias.weight.shape == (9, 3 if causal else 5)
    dense, seen = bias().detach(), set()
    for t in range(9):
        for offset in range(-2, 1 if causal else 3):
            if 0 <= t + offset < 9:
                assert dense[t, t + offset] == bias.weight[t, 2 + offset]
                seen.add((t, t + offset))
    others = [(t, s) for t in range(9) for s in range(9) if (t, s) not in seen]
    assert all(dense[place] == 0 for place in others)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('grid, rank', [((9,), None), ((9,), 4), ((3, 4), 4)], ids=str)
@pytest.mark.parametrize('kind', [AFTFull, AFTLocal])
def test_aft_full_with_its_position_bias_equals_a_mixer(kind, grid, rank, causal):
    """The bias of a causal mixer is lower triangular and has all values below the diagonal."""
    options = dict(window=3) if kind is AFTLocal else {}
    mixer = kind(8, rank=rank, grid=grid, causal=causal, **options)
    for parameter in mixer.pos_bias.parameters():
        nn.init.normal_(parameter)
    w = mixer.position_bias().squeeze(0)
    assert (w.diagonal() != 0).all() and (w.tril(-1) != 0).any()
    assert (w.triu(1) == 0).all() == causal
    full = AFTFull(8, rank=None, grid=grid, causal=causal)
    state = {name: value for name, value in mixer.state_dict().items() if 'pos_bias' not in name}
    full.load_state_dict({**state, 'pos_bias.weight': w})
    x = torch.randn(2, len(w), 8)
    torch.testing.assert_close(mixer(x), full(x))
    if len(grid) == 1:
        torch.testing.assert_close(mixer(x[:, :4]), full(x[:, :4]))


def test_rows_of_a_free_local_bias_are_interpolated():
    small, large = FreeLocalPositionBias((6,), 3, True), FreeLocalPositionBias((12,), 3, True)
    slope = torch.arange(6.0)[:, None] + torch.tensor([0.0, 100.0, 200.0])
    small.weight.data = slope
    large.load_state_dict(small.state_dict())
    inner = (torch.arange(1, 11.0) + 0.5) / 2 - 0.5
    torch.testing.assert_close(large.weight[1:11, 1], inner + 100)
    message = r'weight of the checkpoint must be interpolable to \[12, 5\] .* got \[6, 3\]'
    refuses(message, FreeLocalPositionBias((12,), 3, False).load_state_dict, small.state_dict())


@pytest.mark.parametrize('grid', [(9,), (5, 7), (3, 4, 5)], ids=str)
def test_interpolation_preserves_prefix_constants_and_slopes(grid):
    target = tuple(2 * n for n in grid)
    rows = torch.randn(math.prod(grid), 3)
    assert interpolate(rows, grid, grid) is rows
    prefix = torch.randn(2, 3)
    constant = torch.cat([prefix, torch.full_like(rows, 0.3)])
    resized = interpolate(constant, grid, target, num_prefix_tokens=2)
    torch.testing.assert_close(resized[:2], prefix)
    torch.testing.assert_close(resized[2:], torch.full((math.prod(target), 3), 0.3))
    slope = torch.arange(float(grid[0])).view(-1, *[1] * (len(grid) - 1)).expand(grid)
    resized = interpolate(slope.reshape(-1, 1), grid, target).view(target)
    expected = (torch.arange(2.0 * grid[0]) + 0.5) / 2 - 0.5
    # torch's bicubic kernel (a = −0.75) does not preserve a slope exactly.
    inner, tolerance = (slice(4, -4), 0.05) if len(grid) == 2 else (slice(1, -1), 1e-5)
    expected = expected.view(-1, *[1] * (len(grid) - 1)).expand(target)
    torch.testing.assert_close(resized[inner], expected[inner], atol=tolerance, rtol=0)


def test_an_image_of_positions_is_resized_as_by_torch_in_its_precision():
    rows = torch.randn(35, 3, dtype=torch.float64)
    image = F.interpolate(rows.T.view(1, 3, 5, 7), (4, 9), mode='bicubic').flatten(2)[0].T
    torch.testing.assert_close(interpolate(rows, (5, 7), (4, 9)), image, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    'num_tokens, like, expected',
    [
        (35, (5, 7), (5, 7)),
        (196, (24, 24), (14, 14)),
        (196, (10, 12), (14, 14)),
        (140, (5, 7), (10, 14)),
        (27, (2, 2, 2), (3, 3, 3)),
        (11, (5,), (11,)),
        (11, (5, 7), None),
        (-1, (5,), None),
    ],
)
def test_the_grid_of_a_checkpoint_is_inferred(num_tokens, like, expected):
    assert infer_grid(num_tokens, like) == expected


@pytest.mark.parametrize('rank', [3, None])
def test_a_shorter_sequence_uses_the_first_positions(rank):
    mixer = AFTFull(8, rank=rank, grid=(9,))
    torch.testing.assert_close(mixer.pos_bias((4,)), mixer.pos_bias()[:4, :4])
    torch.testing.assert_close(mixer.pos_bias((4,), (6,)), mixer.pos_bias()[:4, :6])


@pytest.mark.parametrize(
    'loaded, message',
    [
        (dict(grid=(7,), rank=3), r'pos_u of the checkpoint .* on grid \(3, 4\) .*, got \[7, 3\]'),
        (dict(grid=(3, 4), rank=2), r'interpolable to \[12, 3\] .*, got \[12, 2\]'),
        (dict(grid=(5, 5), rank=3, num_prefix_tokens=1), r'\[26, 3\]'),
    ],
    ids=str,
)
def test_a_bias_that_cannot_be_interpolated_is_refused(loaded, message):
    bias, state = FactorizedPositionBias((3, 4), rank=3), FactorizedPositionBias(**loaded)
    refuses(message, bias.load_state_dict, state.state_dict(), strict=False)


def test_a_bias_over_a_memory_is_initialised_by_distance():
    w = MemoryPositionBias((6, 4), (3, 2))().view(6, 4, 3, 2)
    assert (
        w.flatten(2).argmax(2)
        == torch.arange(6).view(3, 2, 1, 1).expand(3, 2, 2, 2).permute(0, 2, 1, 3).reshape(6, 4)
    ).all()
    # The centre is a quarter of a source cell from that of its own cell, 1.25 from the next row.
    torch.testing.assert_close(w[0, 0, 0, 0], torch.tensor(-2 * 2 * 0.25**2))
    torch.testing.assert_close(w[0, 0, 1, 0], torch.tensor(-2 * (1.25**2 + 0.25**2)))


def test_aft_full_over_a_memory_is_equation_2_with_its_bias():
    mixer = AFTFull(6, rank=None, grid=(3, 4), source_grid=(2, 2), qkv_bias=False)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter)
    x, memory = torch.randn(2, 7, 6), torch.randn(2, 4, 6)
    key, value, gate = mixer.key(memory), mixer.value(memory), mixer.query(x).sigmoid()
    weight = torch.exp(key[:, None] + mixer.position_bias()[0, :7, :, None])  # [B, T, S, D]
    mean = (weight * value[:, None]).sum(2) / weight.sum(2)
    torch.testing.assert_close(mixer(x, memory=memory), mixer.proj(gate * mean))


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        (dict(rank=3), 'source_grid must be None except with .* got rank=3'),
        (dict(causal=True), 'source_grid must be None .* got rank=None, causal=True'),
        (dict(gate='none'), "source_grid must be None .* and gate='none'"),
        (dict(grid=(12,)), r'source_grid must have as many dimensions as grid \(12,\)'),
    ],
)
def test_bad_arguments_of_a_bias_over_a_memory_are_refused(wrong, message):
    options = dict(rank=None, grid=(3, 4), source_grid=(2, 2)) | wrong
    refuses(message, AFTFull, 6, **options)


@pytest.mark.parametrize('reparameterize', [True, False])
def test_init_peak_starts_every_head_at_its_nearest_position(reparameterize):
    options = dict(reparameterize=reparameterize, init_std=1e-3, init_peak=3.0)
    bias = ConvPositionBias(6, (3, 3), **options)().flatten(1)
    peaks = bias.argmax(1)
    assert peaks[0] == 4  # the centre, then its four neighbours, then a corner
    assert sorted(peaks[1:5].tolist()) == [1, 3, 5, 7] and peaks[5] in (0, 2, 6, 8)
    torch.testing.assert_close(bias, 3.0 * F.one_hot(peaks, 9), atol=1.5, rtol=0)

    # With a large peak a causal head copies the token of its position.
    options = dict(options, init_peak=60.0, gate='none', qkv_bias=False)
    mixer = AFTConv(6, num_heads=3, kernel_size=5, causal=True, grid=(7,), **options)
    nn.init.eye_(mixer.value.weight)
    nn.init.eye_(mixer.proj.weight)
    nn.init.zeros_(mixer.proj.bias)
    x = torch.randn(2, 7, 6)
    past = F.pad(x, (0, 0, 2, 0))
    expected = torch.cat([x[..., :2], past[:, 1:8, 2:4], past[:, :7, 4:]], dim=-1)
    torch.testing.assert_close(mixer(x)[:, 2:], expected[:, 2:])
    message = 'init_peak must be a finite number, 0 or larger, got -1'
    refuses(message, AFTConv, 6, num_heads=3, kernel_size=5, init_peak=-1)


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize(
    'name', [x for x in MIXERS if x.startswith(('AFTFull', 'AFTLocal')) and x != 'AFTLocalHard']
)
def test_a_pruned_bias_is_computed_in_every_call(name, causal):
    """By a hook of the submodule, which only its call runs."""
    mixer = build(name, causal=causal)
    x = tokens((7,))
    for key, _ in mixer.pos_bias.named_parameters():
        # One at a time: masks of u and v could leave nothing.
        pruned = copy.deepcopy(mixer)
        mask = torch.rand(getattr(mixer.pos_bias, key).shape) < 0.6
        prune.custom_from_mask(pruned.pos_bias, key, mask)
        pruned(x).sum().backward()
        with torch.no_grad():
            getattr(pruned.pos_bias, f'{key}_orig').mul_(-20)
        pruned(x).sum().backward()
        expected = copy.deepcopy(mixer)
        with torch.no_grad():
            getattr(expected.pos_bias, key).mul_(-20 * mask)
            torch.testing.assert_close(pruned(x), expected(x))
            assert not torch.equal(pruned(x), mixer(x))
            if causal:
                steps = [m.step(x[:, 0], m.init_state(len(x)))[0] for m in (pruned, expected)]
                torch.testing.assert_close(*steps)
