"""Generation: steps against the parallel pass, prompts, options, bad input."""

import pytest
import torch
from torch import nn

from aft_mm.models import generate

from ..errors import refuses, refuses_value
from ..helpers import each
from .sequence_models import D, decoder, mixer, model, tokens

LENGTHS = (5, 1, 9)
PIXELS = dict(embedding=dict(type='aft_mm.PixelEmbedding', num_channels=3))
MIXTURE = dict(type='aft_mm.LogisticMixtureHead', embed_dims=D, num_channels=3)


def prompts(lengths=LENGTHS) -> list[torch.Tensor]:
    return [tokens(length) for length in lengths]


@pytest.mark.parametrize('head, grid', [('categorical', (2, 6)), ('mixture', (12,))])
@pytest.mark.parametrize('name', ['AFTLocal', 'AFTConv', 'LSHAttention', 'SoftmaxAttention'])
def test_samples_with_and_without_the_state_are_equal(name, grid, head):
    mixing = mixer(name)
    net = model(token_mixer=mixing, grid=grid)
    starts = prompts()
    if head == 'mixture':
        net = model(MIXTURE, token_mixer=mixing, grid=grid, **PIXELS)
        starts = [tokens(length, 3, high=256) for length in LENGTHS]
    for start in (dict(prompts=starts), dict(batch_size=3)):
        stepped = net.generate(12, **start, seed=1)
        assert torch.equal(stepped, net.generate(12, **start, seed=1, use_state=False))
        assert stepped.shape == ((3, 12) if head == 'categorical' else (3, 12, 3))
        other = net.generate(12, **start, seed=2)
        assert not torch.equal(stepped, other)
    for row, prompt in zip(net.generate(12, starts), starts, strict=True):
        assert torch.equal(row[: len(prompt)], prompt)


def test_long_samples_with_and_without_the_state_are_equal():
    """Sums differ by rounding, which sometimes swaps the ranks of two of the 256 values."""
    head = dict(type='aft_mm.CategoricalHead', embed_dims=D, num_classes=256)
    net = model(head, grid=(150,), vocab_size=256, token_mixer=mixer('SoftmaxAttention'))
    start = [tokens(length, high=256) for length in (60, 1, 7, 33, 2, 5, 80, 19) * 2]
    options = dict(seed=0, top_k=50, top_p=0.9)
    stepped = net.generate(150, start, **options)
    assert torch.equal(stepped, net.generate(150, start, use_state=False, **options))


def test_sequences_do_not_depend_on_the_batch():
    net, starts = model(grid=(12,)), prompts()
    together = net.generate(12, starts, greedy=True)
    for row, prompt in zip(together, starts, strict=True):
        assert torch.equal(row, net.generate(12, [prompt], greedy=True)[0])
        # The most probable token given the tokens before.
        best = net.head.logits(net(row[None])).argmax(-1)[0]
        assert torch.equal(row[len(prompt) :], best[len(prompt) :])


def test_samples_follow_the_model():
    net = model(vocab_size=3, head=dict(type='aft_mm.CategoricalHead', embed_dims=D, num_classes=3))
    generated = net.generate(2, batch_size=6000, seed=0)
    pairs = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    expected = torch.stack([-torch.tensor(s.nats) for s in net(pairs, mode='predict')]).exp()
    assert abs(expected.sum() - 1) < 1e-5
    found = torch.bincount(generated[:, 0] * 3 + generated[:, 1], minlength=9) / 6000
    assert (found - expected).abs().max() < 0.03


def test_each_option_changes_the_sample():
    net = model(grid=(12,))

    def sample(**options):
        return net.generate(12, batch_size=20, **{'seed': 0, **options})

    plain = sample()
    for name, value in dict(temperature=0.2, top_k=2, top_p=0.3, greedy=True, seed=1).items():
        assert not torch.equal(plain, sample(**{name: value})), name
    assert torch.equal(sample(top_k=1, seed=None), sample(greedy=True))


def test_without_a_seed_torch_generates_one():
    net = model(grid=(12,))
    first, second = net.generate(12, batch_size=4), net.generate(12, batch_size=4)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    model(grid=(12,))
    assert torch.equal(net.generate(12, batch_size=4), first)


def test_prompts_may_be_a_batch_bytes_or_lists():
    net, start = model(grid=(12,)), tokens(2, 5)
    expected = net.generate(12, list(start), seed=0)
    assert torch.equal(net.generate(12, start.to(torch.uint8), seed=0), expected)
    assert torch.equal(generate(net, 12, start, batch_size=2, seed=0), expected)
    assert torch.equal(net.generate(12, start[..., None], seed=0), expected)
    assert torch.equal(net.generate(12, start.tolist(), seed=0), expected)


def test_generation_evaluates_and_restores_the_modes():
    net = model(grid=(12,), drop_rate=0.5)
    expected = net.generate(12, seed=0)
    assert expected.shape == (1, 12) and not net.training
    net.train()
    assert torch.equal(net.generate(12, seed=0), expected)
    assert net.training and net.decoder.layers[0].training
    with pytest.raises(ValueError):
        net.generate(12, torch.full((1, 2), 9))
    assert net.training
    net.decoder.layers[0].eval()
    modes = [module.training for module in net.modules()]
    net.generate(12, seed=0)
    assert [module.training for module in net.modules()] == modes


def test_the_progress_bar_is_on_stderr_and_only_on_request(capfd):
    net = model(grid=(12,))
    net.generate(12)
    assert capfd.readouterr() == ('', '')
    net.generate(12, prompts((3,)), progress=True)
    out, err = capfd.readouterr()
    assert not out and 'tokens' in err and '100%' in err


def state_size(state) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel()
    parts = state if isinstance(state, tuple) else vars(state).values()
    return sum(state_size(p) for p in parts if isinstance(p, tuple | torch.Tensor))


@pytest.mark.parametrize(
    'mixing, numbers',
    [
        (dict(type='aft_mm.AFTSimple'), 3 * D),
        (dict(type='aft_mm.AFTLocal', window=8, rank=4), (3 + 2 * 8) * D),
    ],
    ids=['simple', 'local'],
)
def test_the_state_does_not_grow_with_the_sequence(mixing, numbers):
    for length in (40, 160):
        body = decoder(token_mixer=mixing, grid=(length,))
        _, state = body.prefill(tokens(2, length - 2), torch.tensor([length - 2, 7]))
        _, state = body.step(tokens(2), state)
        for block in state.blocks:
            # One more number for the position.
            assert state_size(block) == 2 * (numbers + 1)


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(temperature=0), 'temperature must be .* above 0, got 0'),
        (dict(temperature=-1.0, greedy=True), 'temperature must be .* above 0, got -1.0'),
        (dict(temperature=float('inf')), 'temperature must be .* above 0, got inf'),
        (dict(seed=-1), r'seed must be an int, 0 to 2\^63 − 1, got -1'),
        (dict(seed=2**63), r'seed must be an int, 0 to 2\^63 − 1, got 9223372036854775808'),
        (dict(seed=1.5), r'seed must be an int, 0 to 2\^63 − 1, got 1.5'),
        (dict(top_p=0.0), 'top_p must be a finite number above 0 and at most 1, got 0.0'),
        (dict(top_p=1.5), 'top_p must be a finite number above 0 and at most 1, got 1.5'),
        (dict(top_k=0), 'top_k must be an int, 1 or larger, got 0'),
        (dict(top_k=1.0), 'top_k must be an int, 1 or larger, got 1.0'),
        (dict(length=0), 'length must be an int, 1 or larger, got 0'),
        (dict(length=8.0), 'length must be an int, 1 or larger, got 8.0'),
        (dict(length=13), 'longer than the position table of 12 tokens, got 13'),
        (dict(batch_size=0), r'batch_size must be an int, 1 or larger, got 0'),
        (dict(prompts=[]), "agree and be 1 or more, got {'prompts': 0}"),
        (dict(prompts=[[1], [2]], batch_size=3), "got {'prompts': 2, 'batch_size': 3}"),
        (dict(prompts=[[1, 2], []]), r'prompts\[1\] must have 1 to 7 tokens .*length=8, got 0'),
        (dict(prompts=[[1] * 8]), r'prompts\[0\] must have 1 to 7 tokens .*length=8, got 8'),
        (dict(prompts=[[[1, 2]]]), r'prompts\[0\] must be integers \[L\], got .*int64 \[1, 2\]'),
        (dict(prompts=[[1.5]]), r'prompts\[0\] must be integers \[L\], got .*float32 \[1\]'),
        (dict(prompts=[1, 2]), r'prompts\[0\] must be integers \[L\], got .*int64 \[\]'),
        (dict(prompts=[[1, 7]]), 'a token must be 0 to 6, got 7'),
        (dict(prompts=[[-1]]), 'a token must be 0 to 6, got -1'),
        (dict(source=[torch.tensor([1])]), 'source must be given only to an encoder'),
    ],
    ids=str,
)
def test_bad_input_raises_a_one_line_error(arguments, message):
    refuses(message, model(grid=(12,)).generate, **{'length': 8, **arguments})


WRONG = dict(
    length=(True,),
    temperature=('a', float('nan'), None),
    prompts=('ab', 5, [['a']], [torch.zeros(2, 2).long()], [None]),
    batch_size=(1.5, '2', True),
    top_p=('a',),
    greedy=('no',),
    use_state=(2,),
)


@each('name, values', WRONG.items())
def test_values_of_another_type_are_refused(name, values):
    for value in values:
        refuses_value(name, model(grid=(12,)).generate, **{'length': 8, name: value})


@each('greedy', [False, True])
def test_a_model_with_nan_weights_does_not_sample(greedy):
    damaged = model(grid=(12,))
    nn.init.constant_(damaged.head.weight, torch.nan)
    refuses_value('logits', damaged.generate, 5, greedy=greedy)
