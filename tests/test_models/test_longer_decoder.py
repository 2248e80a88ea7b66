"""Decoders without position vectors, and beyond the length that their mixers have learned."""

import pytest
import torch

from .sequence_models import decoder, tokens

LENGTH, LEARNED = 20, 7
MIXERS = {
    'nearest': dict(type='aft_mm.AFTFull', rank=3, longer='nearest', trained_length=LEARNED),
    'interpolate': dict(
        type='aft_mm.AFTLocal', window=3, longer='interpolate', trained_length=LEARNED
    ),
    'log': dict(type='aft_mm.AFTFull', longer='log', num_heads=2),
    'decay': dict(type='aft_mm.AFTDecay'),
}


@pytest.mark.parametrize('name', MIXERS)
def test_steps_after_a_prompt_equal_the_forward_beyond_the_learned_tokens(name):
    net = decoder(grid=(LENGTH,), positions='none', token_mixer=MIXERS[name])
    assert not any('position_embedding' in key for key in net.state_dict())
    sequence = tokens(2, LENGTH)
    with torch.no_grad():
        expected = net(sequence)
        hidden, state = net.prefill(sequence[:, :5], torch.tensor([5, 2]))
        for step in range(LENGTH - 5):
            rows = torch.tensor([5, 2]) + step
            torch.testing.assert_close(
                hidden, expected[torch.arange(2), rows], atol=1e-5, rtol=1e-4
            )
            if step < LENGTH - 6:
                hidden, state = net.step(sequence[torch.arange(2), rows], state)


def test_without_positions_only_the_mixer_knows_the_order():
    sequence = tokens(1, LENGTH)
    swapped = sequence.clone()
    swapped[0, :4] = sequence[0, :4].flip(0)
    assert not torch.equal(swapped, sequence)
    last = {}
    for positions in ('none', 'learned'):
        torch.manual_seed(0)
        simple = dict(type='aft_mm.AFTSimple')
        options = dict(grid=(LENGTH,), num_kinds=1, num_layers=1, token_mixer=simple)
        net = decoder(positions=positions, **options)
        with torch.no_grad():
            last[positions] = (net(sequence) - net(swapped))[:, -1].abs().max()
    assert last['none'] < 1e-5 < last['learned']
