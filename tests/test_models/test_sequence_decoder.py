"""The decoder: causality, steps, training."""

import pytest
import torch
from torch import nn

from aft_mm.models import SequenceDecoder
from aft_mm.registry import MODELS

from .sequence_models import LOCAL, MIXERS, D, decoder, decoder_config, mixer, randomize, tokens

every_mixer = pytest.mark.parametrize('name', MIXERS)
every_grid = pytest.mark.parametrize('grid', [(9,), (3, 6)], ids=str)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@every_grid
@every_mixer
def test_outputs_only_depend_on_earlier_tokens(name, grid):
    body = decoder(token_mixer=mixer(name), grid=grid)
    t = 5
    x = tokens(2, 9)
    hidden = body(x)
    changed = x.clone()
    changed[:, t:] = (changed[:, t:] + 1) % 7
    moved = (body(changed) - hidden).abs().amax((0, 2))
    assert (moved[: t + 1] < 1e-5).all() and (moved[t + 1 :] > 1e-4).all()


@every_mixer
def test_later_tokens_get_no_gradient(name):
    body = decoder(token_mixer=mixer(name), num_kinds=1, vocab_size=9)
    # Different values, so that each row of the table belongs to one token.
    x, t = torch.randperm(9)[None], 4
    (gradient,) = torch.autograd.grad(body(x)[:, : t + 1].square().sum(), body.embedding.weight)
    assert (gradient[x[0, t:]] == 0).all() and (gradient[x[0, t - 1]] != 0).any()


def test_the_first_output_only_depends_on_the_start_vector():
    body = decoder()
    first = body(tokens(3, 9))[:, 0]
    torch.testing.assert_close(first, first[:1].expand_as(first))
    nn.init.normal_(body.start_embedding)
    assert (body(tokens(3, 9))[:, 0] - first).abs().max() > 1e-3


def test_the_decoder_is_embedding_positions_blocks_and_norm():
    body, x = decoder(), tokens(2, 8)
    inputs = torch.cat([body.start_embedding.expand(2, 1, D), body.embedding(x)], 1)[:, :8]
    hidden = inputs + body.position_embedding.weight[:8]
    for layer in body.layers:
        hidden = layer(hidden)
    torch.testing.assert_close(body(x), body.norm(hidden))


def test_tokens_per_position_share_a_position():
    body, x = decoder(tokens_per_position=3), tokens(2, 9)
    assert body.position_embedding.weight.shape == (3, D) and body.max_length == 9
    whole = decoder()
    state = body.state_dict()
    state['position_embedding.weight'] = state['position_embedding.weight'].repeat_interleave(3, 0)
    whole.load_state_dict(state)
    torch.testing.assert_close(body(x), whole(x))
    hidden, state = body.prefill(x[:, :4], torch.tensor([4, 1]))
    hidden, state = body.step(x[[0, 1], [4, 1]], state)
    torch.testing.assert_close(hidden, whole(x)[[0, 1], [5, 2]], atol=1e-5, rtol=1e-4)


def test_the_gradient_of_a_shared_position_is_deterministic():
    body = decoder(tokens_per_position=3, grid=(3069,), token_mixer=mixer('AFTSimple'))
    threads, gradient = torch.get_num_threads(), torch.randn(3069, D)
    torch.set_num_threads(3)
    try:
        # The tokens of one position are distributed over threads; an unordered sum would vary.
        seen = {
            torch.autograd.grad(
                body.position_of(torch.arange(3069)), body.position_embedding.weight, gradient
            )[0]
            .numpy()
            .tobytes()
            for _ in range(60)
        }
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


@pytest.mark.parametrize(('number', 'grid'), [(0, (9,)), (2, (9,)), (3, (3, 3))])
def test_tokens_per_position_must_divide_the_length(number, grid):
    with pytest.raises(ValueError, match=f'tokens_per_position must be .*1.* got {number}'):
        decoder(tokens_per_position=number, grid=grid)


@every_grid
@every_mixer
def test_a_shorter_sequence_gives_the_same_rows(name, grid):
    body, x = decoder(token_mixer=mixer(name), grid=grid), tokens(2, 9)
    torch.testing.assert_close(body(x[:, :5]), body(x)[:, :5], atol=1e-5, rtol=1e-4)


@every_mixer
def test_every_parameter_gets_a_gradient(name):
    body, x = decoder(token_mixer=mixer(name)).train(), tokens(2, 9)
    (body(x) * torch.randn(2, 9, D)).sum().backward()
    for path, parameter in body.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), path
        # A constant added to all keys cancels in a quotient.
        assert parameter.grad.abs().max() > 1e-7 or path.endswith('key.bias'), path


@pytest.mark.parametrize('drop_rate', [0.0, 0.3])
def test_checkpointing_changes_no_gradient(drop_rate):
    plain, x = decoder(drop_rate=drop_rate).train(), tokens(2, 9)
    saving = decoder(drop_rate=drop_rate, with_cp=True).train()
    saving.load_state_dict(plain.state_dict())
    gradients = []
    for body in (plain, saving):
        torch.manual_seed(1)
        body(x).square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in body.named_parameters()})
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


def test_dropout_also_follows_the_embedding():
    body = decoder(drop_rate=0.5).train()
    ones = body.add_positions(torch.ones(2, 9, D))
    assert 0.2 < (ones == 0).float().mean() < 0.8
    assert sum(isinstance(m, nn.Dropout) and m.p == 0.5 for m in body.modules()) == 1 + 2 * 3


def test_the_decoder_is_causal_over_real_valued_pixels():
    body = decoder(embedding=dict(type='aft_mm.PixelEmbedding', num_channels=3), grid=(3, 3))
    x = tokens(2, 9, 3, high=256)
    hidden = body(x)
    x[:, 4, 2] = (x[:, 4, 2] + 100) % 256
    moved = (body(x) - hidden).abs().amax((0, 2))
    assert (moved[:5] < 1e-5).all() and (moved[5:] > 1e-4).all()


def to_meta(state):
    if isinstance(state, torch.Tensor):
        return state.to('meta')
    if isinstance(state, tuple) and hasattr(state, '_fields'):
        return type(state)(*map(to_meta, state))
    return state


@pytest.mark.parametrize('embedding', ['TokenEmbedding', 'PixelEmbedding'])
def test_a_step_on_a_device_reads_no_values(embedding):
    argument = dict(vocab_size=7) if embedding == 'TokenEmbedding' else dict(num_channels=1)
    embedding = dict(type=f'aft_mm.{embedding}', **argument)
    body = decoder(embedding=embedding, token_mixer=mixer('AFTSimple'))
    hidden, state = body.prefill(tokens(2, 3), torch.tensor([3, 2]))
    blocks = [to_meta(block) for block in state.blocks]
    state = type(state)(blocks, to_meta(state.position))
    hidden, state = body.to('meta').step(tokens(2).to('meta'), state)
    assert hidden.is_meta and hidden.shape == (2, D) and state.position.is_meta


def test_parameter_names_separate_tables_from_weights():
    names = [name for name, _ in decoder().named_parameters()]
    tables = [name for name in names if 'embedding' in name or 'pos_bias' in name]
    assert {name.rpartition('.')[2] for name in names if name not in tables} == {'weight', 'bias'}
    assert len(tables) == 4 + 2 * 2


def test_bad_input_raises_a_one_line_error():
    body = decoder()
    for build, message in [
        (lambda: body(tokens(1, 10)), 'not be longer than the position table of 9 tokens, got 10'),
        (lambda: body(torch.full((1, 3), 7)), 'a token must be 0 to 6, got 7'),
        (lambda: decoder(num_layers=0), 'num_layers must be an int, 1 or larger, got 0'),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            build()
        assert '\n' not in str(error.value)


def test_a_decoder_is_built_from_its_config():
    body = MODELS.build(decoder_config())
    assert isinstance(body, SequenceDecoder)
    assert all(layer.token_mixer.causal for layer in body.layers)
    other = MODELS.build(decoder_config(token_mixer=dict(LOCAL, window=2)))
    randomize(other).load_state_dict(randomize(body).state_dict())
    x = tokens(2, 9)
    assert (other(x) - body(x)).abs().max() > 1e-3
