"""The encoder, and encoder and decoder together."""

import math

import pytest
import torch
from mmengine.optim import OptimWrapper

from aft_mm.registry import MODELS
from aft_mm.structures import SequenceSample

from ..errors import refuses
from .sequence_models import (
    LOCAL,
    assert_every_parameter_has_a_gradient,
    decoder_config,
    mixer,
    model,
    randomize,
    tokens,
)

CROSS = dict(type='aft_mm.SoftmaxAttention', num_heads=3)
ENCODER = dict(decoder_config(num_kinds=1, vocab_size=5), type='aft_mm.SequenceEncoder')


def sources(lengths=(4, 1, 7)) -> list[torch.Tensor]:
    return [tokens(length, high=5) for length in lengths]


def test_every_output_sees_every_token():
    encoder, x = randomize(MODELS.build(ENCODER)), tokens(1, 9, high=5)
    memory = encoder(x)
    x[0, 4] = (x[0, 4] + 1) % 5
    assert ((encoder(x) - memory).abs().amax(2) > 1e-4).all()


@pytest.mark.parametrize('starts', [None, (3, 1, 5)])
def test_generation_reads_the_source(starts):
    net, given = model(encoder=ENCODER, cross_mixer=CROSS), sources() * 8
    for layer in net.decoder.layers:  # otherwise the source hardly changes the samples
        layer.cross_mixer.proj.weight.data *= 50
    starts = None if starts is None else [tokens(length) for length in starts] * 8
    generated = net.generate(9, starts, source=given, seed=0)
    assert torch.equal(generated, net.generate(9, starts, source=given, seed=0, use_state=False))
    assert not torch.equal(generated, net.generate(9, starts, source=given[::-1], seed=0))
    assert generated.shape == (24, 9)
    lists = [source.tolist() for source in given]
    assert torch.equal(generated, net.generate(9, starts, source=lists, seed=0))
    given = [source.float() for source in given]
    message = r'source\[0\] must be integers \[S\] or .* got torch.float32'
    refuses(message, net.generate, 9, starts, source=given)


@pytest.mark.parametrize('with_cp', [False, True])
def test_every_parameter_gets_a_gradient(with_cp):
    net = model(encoder=dict(ENCODER, with_cp=with_cp), cross_mixer=CROSS, with_cp=with_cp).train()
    samples = [SequenceSample(source=source) for source in sources()]
    net(tokens(3, 9), samples, mode='loss')['loss'].backward()
    assert_every_parameter_has_a_gradient(net, least=1e-8)


def test_a_model_learns_to_copy():
    net = MODELS.build(
        dict(
            type='aft_mm.AutoregressiveModel',
            encoder=decoder_config(
                (2,), num_kinds=1, token_mixer=CROSS, embed_dims=24, num_layers=1
            )
            | dict(type='aft_mm.SequenceEncoder'),
            decoder=decoder_config(
                (2,), num_kinds=1, token_mixer=LOCAL, cross_mixer=CROSS, embed_dims=24
            ),
            head=dict(type='aft_mm.CategoricalHead', embed_dims=24, num_classes=7),
        )
    )
    wrapper = OptimWrapper(torch.optim.AdamW(net.parameters(), lr=0.01))
    for _ in range(100):
        x = tokens(32, 2)
        samples = [SequenceSample(source=row.clone()) for row in x]
        net.train_step(dict(inputs=list(x), data_samples=samples), wrapper)
    x = tokens(50, 2)
    assert (net.generate(2, source=x, greedy=True) == x).float().mean() > 0.9


def test_a_missing_source_is_refused():
    net = model(encoder=ENCODER, cross_mixer=CROSS)
    message = 'a source must be given for every sample, got one for 1 of 2 samples'
    refuses(message, net, tokens(2, 9), [SequenceSample(source=sources()[0]), SequenceSample()])
    refuses('got one for 0 of 3 samples', net.generate, 9, batch_size=3)
    message = "agree .* got {'source': 3, 'batch_size': 2}"
    refuses(message, net.generate, 9, batch_size=2, source=sources())


@pytest.mark.parametrize('embedding', ['FrameEmbedding', 'ConvFrameEmbedding'])
def test_hidden_frames_may_hold_nan(embedding):
    mixers = [mixer('AFTConv'), mixer('AFTSimple'), mixer('SoftmaxAttention')]
    embedding = dict(type=f'aft_mm.{embedding}', num_features=5)
    config = dict(decoder_config(token_mixer=mixers, num_layers=3, embedding=embedding))
    net = randomize(MODELS.build({**config, 'type': 'aft_mm.SequenceEncoder'}))
    frames, mask = torch.randn(2, 9, 5), torch.arange(9) < torch.tensor([[9], [4]])
    results = []
    for hidden in (math.nan, 7.0):
        net.zero_grad()
        output = net(frames.masked_fill(~mask[..., None], hidden), mask)[mask]
        output.square().mean().backward()
        results += [[output.detach(), *(p.grad.clone() for p in net.parameters())]]
    torch.testing.assert_close(*results)
    assert all(x.isfinite().all() for x in results[0])
