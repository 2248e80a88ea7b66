"""Heads: likelihoods against explicit sums, samples against the likelihood."""

import pytest
import torch
from scipy.stats import logistic
from torch import nn

from aft_mm.models import CategoricalHead, LogisticMixtureHead
from aft_mm.models.decoding import sample_categorical
from aft_mm.registry import MODELS

from ..errors import refuses
from ..helpers import each
from .sequence_models import D, randomize

VALUES = torch.arange(256)


def mixture(num_channels: int, **kwargs) -> LogisticMixtureHead:
    config = dict(type='aft_mm.LogisticMixtureHead', embed_dims=D, num_channels=num_channels)
    return randomize(MODELS.build({**config, **kwargs}), std=0.5)


def explicit_likelihood(head: LogisticMixtureHead, hidden, pixel) -> float:
    """Return p(pixel) for one hidden vector with the formula of the docstring, in scipy."""
    channels, per = head.num_channels, sum(head.split)
    rows = head.proj(hidden).double().detach().numpy().reshape(-1, per)
    pi = torch.tensor(rows[:, 0]).softmax(0).numpy()
    x = [value / 127.5 - 1 for value in pixel]
    total = 0.0
    for k, row in enumerate(rows):
        mean, scale = row[1 : 1 + channels], torch.tensor(row[1 + channels : 1 + 2 * channels])
        mean, scale = list(mean), scale.clamp(-7, 7).exp().numpy()
        if channels == 3:
            alpha, beta, gamma = torch.tensor(row[7:]).tanh().numpy()
            mean[1] += alpha * x[0]
            mean[2] += beta * x[0] + gamma * x[1]
        p = pi[k]
        for value, centre, m, s in zip(pixel, x, mean, scale, strict=True):
            high = 1 if value == 255 else logistic.cdf(centre + 1 / 255, m, s)
            low = 0 if value == 0 else logistic.cdf(centre - 1 / 255, m, s)
            p *= high - low
        total += p
    return total


@pytest.mark.parametrize('num_channels', [1, 3])
def test_the_mixture_follows_its_formula(num_channels):
    head, hidden = mixture(num_channels), torch.randn(20, D)
    pixels = torch.randint(256, (20, num_channels))
    pixels[:4] = torch.tensor([0, 255, 0, 255])[:, None]
    pixels[0, -1] = 255
    nats = head.nats(hidden, pixels, dtype=torch.float64)
    expected = [
        explicit_likelihood(head, h, p.tolist()) for h, p in zip(hidden, pixels, strict=True)
    ]
    torch.testing.assert_close(
        (-nats).exp(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-12
    )
    single = head.nats(hidden, pixels)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, nats.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('dtype, tolerance', [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize('scale', [0.3, 1.0, 30.0])
def test_probabilities_of_one_channel_sum_to_one(dtype, tolerance, scale):
    head = randomize(mixture(1), std=scale)
    hidden = torch.randn(50, 1, D).expand(-1, 256, -1)
    total = (-head.nats(hidden, VALUES.expand(50, 256), dtype=dtype)).exp().sum(1)
    assert (total - 1).abs().max() < tolerance


@pytest.mark.parametrize('scale', [0.3, 1.0, 30.0])
def test_float32_is_enough_to_sample(scale):
    head = randomize(mixture(1), std=scale)
    hidden = torch.randn(50, 1, D).expand(-1, 256, -1)
    values = VALUES.expand(50, 256)
    single, double = (
        (-head.nats(hidden, values, dtype)).exp() for dtype in (torch.float32, torch.float64)
    )
    # The share of samples that differ from those of float64.
    assert ((single - double).abs().sum(1) / 2).max() < 1e-3


def test_conditional_probabilities_of_three_channels_sum_to_one():
    head = mixture(3, num_components=2)
    hidden = torch.randn(D)

    def p(pixels):
        nats = head.nats(hidden.expand(*pixels.shape[:-1], D), pixels, dtype=torch.float64)
        return (-nats).exp()

    # Summed over green and blue, the likelihood must be that of a mixture of red alone.
    reds = torch.tensor([0, 100, 255])
    pairs = torch.cartesian_prod(VALUES, VALUES)
    marginal = []
    for red in reds:
        pixels = torch.cat([red.expand(len(pairs), 1), pairs], 1)
        marginal.append(p(pixels).sum())
    alone = mixture(1, num_components=2)
    alone.proj.weight.data = head.proj.weight.unflatten(0, (2, 10))[:, [0, 1, 4]].flatten(0, 1)
    alone.proj.bias.data = head.proj.bias.unflatten(0, (2, 10))[:, [0, 1, 4]].flatten()
    expected = (-alone.nats(hidden.expand(3, D), reds, dtype=torch.float64)).exp()
    torch.testing.assert_close(torch.stack(marginal), expected, rtol=1e-10, atol=0)
    total = (-alone.nats(hidden.expand(256, D), VALUES, dtype=torch.float64)).exp().sum()
    assert abs(total - 1) < 1e-12


def test_each_coefficient_changes_the_likelihood():
    head, hidden = mixture(3), torch.randn(1, D)
    base = torch.tensor([[100, 100, 100]])
    outputs = head.proj(hidden).detach().unflatten(-1, (-1, 10))
    coefficients = outputs[..., 7:].tanh()
    assert (coefficients.abs().max() <= 1) and (coefficients != 0).all()
    for changed in range(3):
        weight = head.proj.weight.data.clone()
        nats = head.nats(hidden, base)
        head.proj.weight.data.unflatten(0, (10, 10))[:, 7 + changed] += 0.5
        assert (head.nats(hidden, base) - nats).abs() > 1e-4
        head.proj.weight.data = weight


@pytest.mark.parametrize('num_channels', [1, 3])
@pytest.mark.parametrize('size', [1e-4, 1e4])
def test_extreme_outputs_stay_finite(num_channels, size):
    head = mixture(num_channels)
    hidden = (torch.randn(64, D) * size).requires_grad_()
    pixels = torch.randint(256, (64, num_channels))
    pixels[:10], pixels[10:20] = 0, 255
    nats = head.nats(hidden, pixels)
    nats.sum().backward()
    assert nats.isfinite().all() and (nats >= -1e-5).all()
    assert hidden.grad.isfinite().all()
    for name, parameter in head.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


def test_autocast_does_not_change_the_mixture():
    head, hidden = mixture(3), torch.randn(5, D)
    pixels = torch.randint(256, (5, 3))
    expected = head.nats(hidden, pixels)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(head.nats(hidden, pixels), expected)
    assert head.bfloat16().nats(hidden.bfloat16(), pixels).dtype == torch.float32


def test_a_far_mean_has_a_gradient():
    """The gradient is large even if the density would underflow to log 0."""
    head = mixture(1, num_components=1)
    nn.init.zeros_(head.proj.weight)
    head.proj.bias.data = torch.tensor([0.0, 50.0, -6.0])
    head.nats(torch.zeros(1, D), torch.tensor([10])).sum().backward()
    assert head.proj.bias.grad[1] > 100


@pytest.mark.parametrize('num_channels', [1, 3])
def test_samples_follow_the_likelihood(num_channels):
    head = mixture(num_channels, num_components=3)
    # Means far outside on both sides put the mass on few values, so their counts are large.
    outputs = head.proj.bias.data.view(3, -1)
    outputs[:, 1 : 1 + num_channels] = torch.randn(3, num_channels) * 3
    nn.init.normal_(head.proj.weight, std=0.01)
    hidden, n = torch.randn(1, D), 5000
    sampled = head.sample(hidden.expand(n, D)).view(n, num_channels)
    values, counts = sampled.unique(dim=0, return_counts=True)
    often = counts > 50
    assert often.sum() >= 2
    p = (-head.nats(hidden.expand(len(values), D), values, dtype=torch.float64)).exp()
    deviation = (counts / n - p) / (p * (1 - p) / n).sqrt()
    assert deviation[often].abs().max() < 5
    assert head.sample(hidden).shape == ((1,) if num_channels == 1 else (1, 3))


def test_greedy_takes_the_most_probable_value_of_each_channel():
    head, hidden = mixture(1), torch.randn(8, D)
    nats = head.nats(hidden[:, None].expand(-1, 256, -1), VALUES.expand(8, 256))
    assert torch.equal(head.sample(hidden, greedy=True), nats.argmin(1))
    colour = mixture(3)
    red = colour.sample(hidden, greedy=True)[:, 0]
    alone = mixture(1)
    for name, parameter in alone.proj.named_parameters():
        source = getattr(colour.proj, name).data.unflatten(0, (10, 10))
        parameter.data = source[:, [0, 1, 4]].flatten(0, 1)
    assert torch.equal(red, alone.sample(hidden, greedy=True))


def test_the_categorical_head_is_a_softmax():
    head, hidden = randomize(CategoricalHead(D, 5)), torch.randn(2, 3, D)
    targets = torch.randint(5, (2, 3))
    p = (hidden @ head.weight.T + head.bias).softmax(-1)
    expected = -p.gather(-1, targets[..., None]).squeeze(-1).log()
    torch.testing.assert_close(head.nats(hidden, targets), expected)
    assert head.nats(hidden, targets, dtype=torch.float64).dtype == torch.float64
    assert head.dims_per_token == 1 and LogisticMixtureHead(D, 3).dims_per_token == 3


LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04]).log()


def frequencies(n=40000, **options) -> torch.Tensor:
    order = torch.tensor([3, 0, 4, 1, 2])  # the values are not sorted
    sampled = sample_categorical(LOGITS[order].expand(n, 5), **options)
    return torch.bincount(order[sampled], minlength=5) / n


@pytest.mark.parametrize(
    'options, expected',
    [
        (dict(), [0.5, 0.25, 0.15, 0.06, 0.04]),
        (dict(temperature=0.5), [0.25, 0.0625, 0.0225, 0.0036, 0.0016]),
        (dict(temperature=1e4), [1, 1, 1, 1, 1]),
        (dict(temperature=1e-4), [1, 0, 0, 0, 0]),
        (dict(top_k=1), [1, 0, 0, 0, 0]),
        (dict(top_k=3), [0.5, 0.25, 0.15, 0, 0]),
        (dict(top_k=9), [0.5, 0.25, 0.15, 0.06, 0.04]),
        # 0.5 + 0.25 is less than 0.76, so the third value is included.
        (dict(top_p=0.76), [0.5, 0.25, 0.15, 0, 0]),
        (dict(top_p=0.74), [0.5, 0.25, 0, 0, 0]),
        (dict(top_p=1e-9), [1, 0, 0, 0, 0]),
        (dict(top_p=1.0), [0.5, 0.25, 0.15, 0.06, 0.04]),
        # After top_k, the probabilities are 2/3 and 1/3; the first one exceeds 0.6.
        (dict(top_k=2, top_p=0.6), [1, 0, 0, 0, 0]),
        (dict(top_k=2, top_p=0.7), [2, 1, 0, 0, 0]),
        (dict(greedy=True), [1, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_sampling_options_follow_their_definition(options, expected):
    expected = torch.tensor(expected).float()
    expected = expected / expected.sum()
    found = frequencies(**options)
    assert ((found > 0) <= (expected > 0)).all()
    assert (found - expected).abs().max() < 0.015


@pytest.mark.parametrize('options', [dict(), dict(top_k=200), dict(top_p=0.99)], ids=str)
def test_rounding_that_swaps_two_ranks_does_not_change_the_sample(options):
    logits = torch.randn(4000, 256, dtype=torch.float64) * 0.003
    rounded = logits + 1e-7 * torch.randn_like(logits)
    swapped = (logits.argsort(-1) != rounded.argsort(-1)).any(-1)
    assert swapped.float().mean() > 0.2
    sampled, again = (
        sample_categorical(x, **options, generator=torch.Generator().manual_seed(0))
        for x in (logits, rounded)
    )
    assert torch.equal(sampled, again)


@pytest.mark.parametrize('options', [dict(), dict(top_k=20), dict(top_p=0.9)], ids=str)
def test_samples_of_bfloat16_logits_are_those_in_float32(options):
    logits = torch.randn(2000, 256).bfloat16()
    sampled, expected = (
        sample_categorical(x, **options, generator=torch.Generator().manual_seed(0))
        for x in (logits, logits.float())
    )
    assert torch.equal(sampled, expected)


def test_the_first_of_equally_probable_values_is_allowed():
    logits = torch.zeros(500, 9)
    assert set(sample_categorical(logits, top_k=2).tolist()) == {0, 1}
    assert set(sample_categorical(logits, top_p=0.3).tolist()) == {0, 1, 2}
    # The first of two suffices for a half.
    assert set(sample_categorical(logits[:, :2], top_p=0.5).tolist()) == {0}


def test_greedy_uses_no_randomness_and_samples_use_the_generator():
    logits = torch.randn(50, 9)
    state = torch.get_rng_state()
    assert torch.equal(sample_categorical(logits, greedy=True), logits.argmax(1))
    generators = [torch.Generator().manual_seed(3) for _ in range(2)]
    first, second = (sample_categorical(logits, generator=g) for g in generators)
    assert torch.equal(first, second) and not torch.equal(
        first, sample_categorical(logits, generator=generators[0])
    )
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize('head', [CategoricalHead(D, 256), LogisticMixtureHead(D, 3)], ids=repr)
def test_heads_pass_on_every_sampling_option(head):
    randomize(head)
    hidden = torch.randn(200, D)

    def sample(**options):
        return head.sample(hidden, **options, generator=torch.Generator().manual_seed(0))

    plain = sample()
    for options in [dict(temperature=0.3), dict(top_k=2), dict(top_p=0.5), dict(greedy=True)]:
        assert not torch.equal(plain, sample(**options)), options


@each('head', [CategoricalHead(D, 3), LogisticMixtureHead(D, 1)])
def test_one_vector_has_one_likelihood(head):
    hidden = torch.randn(2, D)
    targets = torch.tensor([1, 2]).view(2, *[1] * isinstance(head, LogisticMixtureHead))
    together = head.nats(hidden, targets)
    torch.testing.assert_close(head.nats(hidden[0], targets[0]), together[0])


def test_bad_input_raises_a_one_line_error():
    hidden, mixed = torch.randn(2, D), mixture(3)
    refuses('num_channels must be 1 or 3, got 2', LogisticMixtureHead, D, 2)
    refuses('num_components must be an int, 1 or larger, got 0', LogisticMixtureHead, D, 1, 0)
    refuses('num_classes must be an int, 1 or larger, got 0', CategoricalHead, D, 0)
    refuses(r's \[2, 3\], got .*int64 \[2\]', mixed.nats, hidden, torch.zeros(2).long())
    message = r'must be integers \[2, 3\], got torch.float32 \[2, 3\]'
    refuses(message, mixed.nats, hidden, torch.zeros(2, 3))
    message = r'must be integers \[2\], got torch.float32 \[2\]'
    refuses(message, CategoricalHead(D, 3).nats, hidden, torch.zeros(2))
    message = r'tie\(embedding\) must be called'
    refuses(message, CategoricalHead(D, 3, tied=True).logits, hidden)
    refuses('finite number above 0, got 0', mixed.sample, hidden, temperature=0)
    for name, value in (('temperature', 0.5), ('top_k', 3), ('top_p', 0.9)):
        message = f'{name} has no effect with greedy=True'
        refuses(message, sample_categorical, hidden, greedy=True, **{name: value})
    for wrong in (-1.5, float('nan')):
        message = f'finite number above 0, got {wrong}'
        refuses(message, sample_categorical, hidden, temperature=wrong)
    for wrong in (0, 2.5):
        message = f'top_k must be an int, 1 or larger, got {wrong}'
        refuses(message, sample_categorical, hidden, top_k=wrong)
    for wrong in (0, 1.01):
        message = f'top_p must be .* above 0 and at most 1, got {wrong}'
        refuses(message, sample_categorical, hidden, top_p=wrong)
