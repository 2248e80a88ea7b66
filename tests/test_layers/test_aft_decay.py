"""AFT-decay against the explicit sum, long sequences, large keys, its state and its start."""

import pytest
import torch
from torch import nn

from aft_mm import ops
from aft_mm.layers import AFTDecay
from aft_mm.ops import reference

from ..errors import refuses
from ..helpers import each
from .mixer_cases import check_steps

D = 12


def build(**options):
    mixer = AFTDecay(D, causal=True, **options)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return mixer.eval()


def explicit(query, key, value, decay, keep=None):
    """Return the sum over all pairs in float64."""
    query, key, value, decay = (x.double() for x in (query, key, value, decay))
    token = torch.arange(key.shape[1])
    distance = token[:, None] - token
    logits = key[:, None] - decay * distance[..., None]
    logits = logits.masked_fill((distance < 0)[..., None], -torch.inf)
    if keep is not None:
        logits = logits.masked_fill(~keep[:, None, :, None], -torch.inf)
    return query.sigmoid() * (logits.softmax(2) * value[:, None]).sum(2)


@each('decay', [0.0, 1e-4, 0.02, 0.4, 3.0, 40.0])
@each('scale', [1.0, 30.0, 1e4])
@each('tokens', [1, 33, 300])
def test_sums_are_exact_for_any_decay_and_key(tokens, scale, decay):
    query, key, value = torch.randn(3, 2, tokens, 5)
    key[:, tokens // 3, 2] += 3 * scale  # a token that outlives many
    key[..., 3] += 1e4 / scale  # a constant
    decays = decay * torch.rand(5)
    keep = torch.rand(2, tokens) < 0.8
    keep[:, 0] = True
    tensors = [x.requires_grad_() for x in (query, scale * key, value, decays)]
    for mask in (None, keep):
        got = ops.aft_decay(*tensors, key_mask=mask)
        expected = explicit(*tensors, mask)
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-5)
        weight = torch.randn_like(got)
        gradients = torch.autograd.grad((got * weight).sum(), tensors)
        of_sum = torch.autograd.grad((expected * weight).sum(), tensors)
        for ours, theirs in zip(gradients, of_sum, strict=True):
            largest = float(theirs.abs().max()) + 1e-3
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * largest)


def test_a_constant_decay_is_aft_simple_of_growing_keys_at_any_length():
    """In float64, which the growing keys need: at the end they are 30,000 nats larger."""
    key, value = torch.randn(2, 1, 100_000, 3)
    decay = torch.tensor([0.0, 0.3, 1e-3])
    growing = key.double() + decay.double() * torch.arange(100_000)[:, None]
    expected = ops.aft_simple(None, growing, value.double(), causal=True, gate='none')
    got = ops.aft_decay(None, key, value, decay, gate='none')
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-5)


def test_a_state_stays_exact_over_many_tokens():
    decay = torch.tensor([1e-5, 0.2, 2.0, 1e-2])
    key, value = torch.randn(2, 1, 3000, 4)
    key = key + 1e4  # spacing 1e-3 in float32
    rows = ops.aft_decay(None, key, value, decay, gate='none')
    state = ops.aft_decay_init_state(1, 4)
    state = ops.prefill(state, key[:, :1000], value[:, :1000], torch.tensor([1000]), decay=decay)
    assert all(x.numel() <= 4 for x in state.sums)
    for t in range(1000, 3000):
        row, state = ops.aft_decay_step(state, None, key[:, t], value[:, t], decay, gate='none')
        if t % 500 == 499:
            torch.testing.assert_close(row, rows[:, t], rtol=0, atol=1e-5)


@each('offset', [0.0, 1e12, -1e12])
@each('dtype', [torch.float64, torch.float32])
@each('prompt', [0, 1, 150])
def test_steps_next_to_large_keys_do_not_lose_the_decay(prompt, dtype, offset):
    """The spacing of numbers is 65,536 near 1e12 in float32, and 1e-4 in float64."""
    decay = torch.tensor([0.0, 1e-5, 3e-3, 0.4, 30.0, 2e3, -0.1], dtype=dtype)
    key, value = torch.randn(2, 1, 300, 7, dtype=dtype)
    key = key + offset
    key[:, 100] += 40  # of 1e12 an overwhelming one in float64, none in float32
    call = dict(causal=True, key_mask=None, gate='none')
    rows = reference.aft_decay(None, key, value.double(), decay, **call)
    state = ops.aft_decay_init_state(1, 7, dtype=dtype)
    state = ops.prefill(state, key, value, torch.tensor([prompt]), decay=decay)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    for t in range(prompt, 300):
        row, state = ops.aft_decay_step(state, None, key[:, t], value[:, t], decay, gate='none')
        torch.testing.assert_close(row.double(), rows[:, t], rtol=0, atol=tolerance)


@pytest.mark.parametrize('lengths', [None, (0, 40), (65, 33)], ids=str)
def test_steps_after_prompts_equal_the_forward_beyond_any_grid(lengths):
    mixer = build(grid=(7,))
    check_steps(mixer, torch.randn(2, 70, D), lengths, atol=1e-5, rtol=1e-4)


def test_decays_are_positive_learned_and_start_from_fast_to_slow():
    mixer = AFTDecay(8, causal=True)
    ops_decay = mixer.log_decay.exp()
    torch.testing.assert_close(ops_decay, torch.tensor([2.0**-i for i in range(1, 9)]))
    x = torch.randn(2, 40, 8)
    before = mixer(x)
    before.square().sum().backward()
    assert (mixer.log_decay.grad != 0).all()
    nn.init.constant_(mixer.log_decay, -40.0)  # no decay is AFT-simple
    query, key, value = (layer(x) for layer in (mixer.query, mixer.key, mixer.value))
    simple = mixer.proj(ops.aft_simple(query, key, value, causal=True))
    torch.testing.assert_close(mixer(x), simple)
    assert (before - simple).abs().max() > 1e-3


def test_wrong_arguments_are_refused():
    def state():
        return ops.aft_decay_init_state(1, 3)

    x = torch.randn(1, 4, 3)
    for wrong in (torch.ones(4), torch.ones(1, 3), torch.tensor(1.0)):
        refuses(r'decay must be \[3\], a number per channel', ops.aft_decay, x, x, x, wrong)
    refuses('decay must be a tensor of float64', ops.aft_decay, x, x, x, 0.5)
    token = x[:, 0]
    refuses('decay must be', ops.aft_decay_step, state(), token, token, token, torch.ones(4))
    lengths = torch.tensor([4])
    refuses(r'decay must be \[3\]', ops.prefill, state(), x, x, lengths, decay=torch.ones(2))
    other = ops.aft_simple_init_state(1, 3, key_function='relu2')
    refuses(
        'state must be made with the key_function',
        ops.aft_decay_step,
        other,
        token,
        token,
        token,
        torch.ones(3),
    )
    other = ops.aft_full_init_state(1, 3, 9)
    refuses('state must be made with', ops.prefill, other, x, x, lengths, decay=torch.ones(3))
