"""Decoders of sequences, also of longer ones than they were trained on."""

import pytest
import torch
from torch import nn

from ..errors import refuses
from ..helpers import each
from .sequence_models import D, decoder, mixer, tokens


@each('grid', [(9,), (3, 6)])
@pytest.mark.parametrize('kind', ['tokens', 'pixels'])
def test_outputs_only_depend_on_earlier_tokens(kind, grid):
    if kind == 'pixels':
        body = decoder(embedding=dict(type='aft_mm.PixelEmbedding', num_channels=3), grid=grid)
        x, step, values = tokens(2, 9, 3, high=256), 100, 256
    else:
        body = decoder(grid=grid)
        x, step, values = tokens(2, 9), 1, 7
    hidden, t = body(x), 5
    x[:, t:] = (x[:, t:] + step) % values
    moved = (body(x) - hidden).abs().amax((0, 2))
    assert (moved[: t + 1] < 1e-5).all() and (moved[t + 1 :] > 1e-4).all()


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


LENGTH, LEARNED = 20, 7
LONGER = [
    dict(type='aft_mm.AFTFull', rank=3, longer='nearest', trained_length=LEARNED),
    dict(type='aft_mm.AFTLocal', window=3, longer='interpolate', trained_length=LEARNED),
    dict(type='aft_mm.AFTFull', longer='log', num_heads=2),
    dict(type='aft_mm.AFTDecay'),
]


@torch.no_grad()
def test_steps_after_a_prompt_equal_the_forward_beyond_the_learned_tokens():
    net = decoder(grid=(LENGTH,), positions='none', token_mixer=LONGER, num_layers=4).double()
    assert not any('position_embedding' in key for key in net.state_dict())
    sequence = tokens(2, LENGTH)
    expected = net(sequence)
    hidden, state = net.prefill(sequence[:, :5], torch.tensor([5, 2]))
    for step in range(LENGTH - 5):
        rows = torch.tensor([5, 2]) + step
        torch.testing.assert_close(hidden, expected[torch.arange(2), rows])
        if step < LENGTH - 6:
            hidden, state = net.step(sequence[torch.arange(2), rows], state)


@torch.no_grad()
def test_steps_of_frames_equal_the_forward():
    frames = torch.randn(2, 9, 5)
    net = decoder(embedding=dict(type='aft_mm.FrameEmbedding', num_features=5))
    expected = net(frames)
    hidden, state = net.prefill(frames[:, :3], torch.tensor([3, 3]))
    for t in range(3, 9):
        torch.testing.assert_close(hidden, expected[:, t])
        if t < 8:
            hidden, state = net.step(frames[:, t], state)
    sees_later = dict(type='aft_mm.ConvFrameEmbedding', num_features=5)
    refuses('see later frames, got ConvFrameEmbedding', decoder, embedding=sees_later)


@torch.no_grad()
def test_without_positions_only_the_mixer_knows_the_order():
    sequence = tokens(1, LENGTH)
    swapped = sequence.clone()
    swapped[0, :4] = sequence[0, :4].flip(0)
    assert not torch.equal(swapped, sequence)
    last = {}
    for positions in ('none', 'learned'):
        torch.manual_seed(0)
        options = dict(grid=(LENGTH,), num_kinds=1, num_layers=1, token_mixer=mixer('AFTSimple'))
        net = decoder(positions=positions, **options)
        last[positions] = (net(sequence) - net(swapped))[:, -1].abs().max()
    assert last['none'] < 1e-5 < last['learned']


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


def test_bad_input_raises_a_one_line_error():
    body = decoder()
    refuses('longer than the position table of 9 tokens, got 10', body, tokens(1, 10))
    body = decoder(positions='none', token_mixer=mixer('AFTDecay'))
    refuses('longer than the grid of 9 tokens, got 10', body, tokens(1, 10))
    refuses('longer than the grid of 9 tokens, got 10', body.prefill, tokens(1, 9), torch.ones(1))
    refuses('a token must be 0 to 6, got 7', body, torch.full((1, 3), 7))
    _, state = body.prefill(tokens(3, 2), torch.tensor([2, 2, 1]))
    message = 'token must be one for each of the 3 sequences of the state'
    refuses(message, body.step, tokens(1), state)
    refuses('num_layers must be an int, 1 or larger, got 0', decoder, num_layers=0)
    for number, grid in ((0, (9,)), (2, (9,)), (3, (3, 3))):
        message = f'tokens_per_position must be .*1.* got {number}'
        refuses(message, decoder, tokens_per_position=number, grid=grid)
