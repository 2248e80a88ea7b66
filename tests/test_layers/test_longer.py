"""Sequences longer than the learned position biases: each choice of `longer`, forward and steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aft_mm.layers import AFTFull, AFTLocal, AFTLocalLearned

from ..errors import refuses
from .mixer_cases import check_steps

D, LEARNED, LONG = 12, 9, 23
MIXERS = {
    'full-factors': (AFTFull, dict(rank=3)),
    'full-free': (AFTFull, dict(rank=None)),
    'local-factors': (AFTLocal, dict(rank=3, window=4)),
    'local-free': (AFTLocal, dict(rank=None, window=4)),
    'local-wide': (AFTLocal, dict(rank=3, window=40)),
    'local-wide-free': (AFTLocal, dict(rank=None, window=40)),
    'local-one': (AFTLocal, dict(rank=2, window=1)),
    'local-learned': (AFTLocalLearned, dict(rank=3, window=5)),
}
FUNCTIONS = {
    'linear': (AFTFull, dict(longer='linear', num_heads=3)),
    'log': (AFTFull, dict(longer='log', num_heads=4)),
}
every_mixer = pytest.mark.parametrize('name', MIXERS)
every_choice = pytest.mark.parametrize('longer', ['nearest', 'interpolate'])
every_function = pytest.mark.parametrize('name', FUNCTIONS)
both = pytest.mark.parametrize('causal', [False, True])


def build(name, **options):
    """Build a mixer with random parameters."""
    cls, own = {**MIXERS, **FUNCTIONS}[name]
    torch.manual_seed(0)
    mixer = cls(D, **own, **{'grid': (LEARNED,), **options}).eval()
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer


def learned_bias(mixer):
    """Return the dense w of the learned tokens, not only in the window."""
    if isinstance(mixer, AFTFull) or hasattr(mixer.pos_bias, 'pos_u'):
        return mixer.pos_bias().detach()
    dense = torch.full((LEARNED, LEARNED), torch.nan)
    last = mixer.pos_bias.weight.shape[1]
    for t in range(LEARNED):
        for s in range(LEARNED):
            column = mixer.reach + s - t
            if 0 <= column < last:
                dense[t, s] = mixer.pos_bias.weight[t, column].detach()
    return dense


def nearest(w, length):
    """Return w [length, length]: pair by pair, the nearest learned one on the diagonal."""
    result, last = torch.zeros(length, length), len(w) - 1
    for t in range(length):
        for s in range(length):
            if max(t, s) <= last:
                result[t, s] = w[t, s]
            elif s <= t:
                result[t, s] = w[last, max(last - (t - s), 0)]
            else:
                result[t, s] = w[max(last - (s - t), 0), last]
    return result


def stretched(w, length):
    return F.interpolate(w[None, None], (length, length), mode='bilinear')[0, 0]


def expected(mixer, w, x):
    """Return the mixer's output by sums in float64 with a dense w [T, T] or [h, T, T]."""
    query, key, value = (layer(x).double() for layer in (mixer.query, mixer.key, mixer.value))
    w, length = w.double(), x.shape[1]
    if isinstance(mixer, AFTLocal):
        token = torch.arange(length)
        w = w.where((token - token[:, None]).abs() < mixer.window, 0)
    w = w.expand(D, -1, -1) if w.dim() == 2 else w.repeat_interleave(D // len(w), 0)
    if mixer.causal:
        w = w.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    if mixer.normalized:
        weights = (w.permute(1, 2, 0) + key[:, None]).softmax(2)
    else:
        visible = torch.ones(length, length).tril() if mixer.causal else torch.ones(length, length)
        keys = key[:, None].masked_fill(visible[..., None] == 0, -torch.inf).softmax(2)
        weights = w.permute(1, 2, 0).softmax(1) * keys
    mixed = query.sigmoid() * (weights * value[:, None]).sum(2)
    return mixer.proj(mixed.float())


@both
@every_choice
@every_mixer
def test_a_longer_sequence_gets_the_bias_of_its_choice(name, longer, causal):
    mixer = build(name, longer=longer, causal=causal)
    w = learned_bias(mixer)
    x = torch.randn(2, LONG, D)
    for length in (4, LEARNED, LEARNED + 1, LONG):
        if longer == 'nearest':
            bias = nearest(w, length)
        elif length <= LEARNED:
            bias = w[:length, :length]
        else:
            bias = stretched(w, length)
            if 'free' in name and isinstance(mixer, AFTLocal):
                bias = rows_stretched(mixer, length)
        torch.testing.assert_close(mixer(x[:, :length]), expected(mixer, bias, x[:, :length]))


def rows_stretched(mixer, length):
    """Return the dense w whose rows by offset are interpolated along the tokens."""
    rows = F.interpolate(mixer.pos_bias.weight.detach().T[None], length, mode='linear')[0].T
    dense = torch.zeros(length, length)
    for t in range(length):
        for s in range(length):
            column = mixer.reach + s - t
            if 0 <= column < rows.shape[1]:
                dense[t, s] = rows[t, column]
    return dense


@both
@every_function
def test_a_function_of_the_distance_has_any_length(name, causal):
    mixer = build(name, causal=causal)
    slope = mixer.pos_bias.log_slope.exp().double()
    for length in (1, 4, LONG):
        token = torch.arange(length)
        distance = (token - token[:, None]).abs().double()
        w = -slope[:, None, None] * (distance if name == 'linear' else (1 + distance).log())
        x = torch.randn(2, length, D)
        torch.testing.assert_close(mixer(x), expected(mixer, w, x))
    kernel = mixer.position_bias()
    assert kernel.shape == (mixer.num_heads, 2 * LEARNED - 1)
    torch.testing.assert_close(kernel[:, LEARNED - 1 :], w[:, 0, :LEARNED].float())
    torch.testing.assert_close(kernel, kernel.flip(1))


@pytest.mark.parametrize('lengths', [None, (0, 3), (12, 7), (22, 22)], ids=str)
@pytest.mark.parametrize('name', [*MIXERS, *FUNCTIONS])
def test_steps_and_prompts_beyond_the_learned_tokens_equal_the_forward(name, lengths):
    choices = [{}]
    if name in MIXERS:
        choices = [dict(longer=x, trained_length=LEARNED) for x in ('nearest', 'interpolate')]
    for options in choices:
        mixer = build(name, causal=True, grid=(LONG,), **options)
        x = torch.randn(2, LONG, D)
        state = check_steps(mixer, x, lengths, atol=1e-5, rtol=1e-4)
        rows = torch.tensor([1, 0, 1])
        assert mixer.select_state(state, rows).position.shape == (3,)
        if lengths is None:
            # A shorter call has the same biases, as the stretch is that of the grid.
            torch.testing.assert_close(mixer(x[:, :14]), mixer(x)[:, :14])
            for refused in (state, mixer.prefill(x, torch.tensor([LONG, LONG]))[1]):
                refuses('state must hold at most 23 tokens', mixer.step, x[:, 0], refused)


@both
@every_choice
@every_mixer
def test_packed_sequences_have_the_bias_of_their_own_length(name, longer, causal):
    mixer = build(name, causal=causal, longer=longer)
    parts = [torch.randn(1, length, D) for length in (20, 17, 9, 8, 17)]
    got = mixer(torch.cat(parts, 1), cu_seqlens=torch.tensor([0, 20, 37, 46, 54, 71]))
    torch.testing.assert_close(got, torch.cat([mixer(part) for part in parts], 1))


@both
@pytest.mark.parametrize('name', ['full-factors', 'local-free', 'linear', 'log'])
def test_gradients_reach_the_learned_bias_from_beyond(name, causal):
    options = {} if name in FUNCTIONS else dict(longer='nearest')
    mixer = build(name, causal=causal, **options)
    x = torch.randn(2, LONG, D)
    mixer(x)[:, LEARNED:].square().sum().backward()
    for parameter in mixer.pos_bias.parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 1e-5


@pytest.mark.parametrize('name', ['full-free', 'full-factors', 'linear', 'log'])
def test_a_memory_may_be_longer_too(name):
    """One row per token: the first rows of a longer sequence that is its own memory."""
    mixer = build(name, **({} if name in FUNCTIONS else dict(longer='nearest')))
    memory = torch.randn(2, LONG, D)
    torch.testing.assert_close(mixer(memory[:, :5], memory=memory), mixer(memory)[:, :5])


def test_without_the_option_a_longer_sequence_is_refused():
    message = r'grid must fit .* learned on grid \(9,\), got \(23,\)'
    for name in MIXERS:
        refuses(message, build(name), torch.randn(1, LONG, D))


def test_a_checkpoint_of_the_learned_length_is_loaded_unchanged():
    short = build('full-factors')
    mixer = build('full-factors', longer='nearest', trained_length=LEARNED, grid=(LONG,))
    mixer.load_state_dict(short.state_dict())
    x = torch.randn(2, LEARNED, D)
    torch.testing.assert_close(mixer(x), short(x))
    assert mixer.pos_bias.pos_u.shape == (LEARNED, 3)


def test_wrong_arguments_are_refused():
    def full(message, **options):
        refuses(message, AFTFull, D, **{'grid': (9,), **options})

    choices = 'nearest, interpolate, linear, log'
    full(f"longer must be one of {choices}, got 'far'", longer='far')
    full('longer must be None on a grid of 2 dimensions', longer='nearest', grid=(3, 3))
    full('longer must be None with a source_grid', longer='nearest', num_prefix_tokens=1)
    full('longer must be None with', longer='nearest', rank=None, source_grid=(4,))
    full('rank and init_std must be left at their defaults', longer='log', num_heads=3, rank=4)
    full('num_heads must be', longer='linear')
    full('num_heads must be', longer='linear', num_heads=5)
    full('num_heads must be None except', num_heads=3)
    full('trained_length must be at most T', trained_length=5)
    full('trained_length must be at most T', longer='nearest', trained_length=10)
    full('trained_length must be an int', longer='nearest', trained_length=0)
    local = dict(window=2, grid=(9,))
    refuses('longer must be one of nearest, interpolate, got', AFTLocal, D, longer='log', **local)
    message = "window must be 1 or larger with longer='nearest', got 0"
    refuses(message, AFTLocal, D, window=0, grid=(9,), longer='nearest')
