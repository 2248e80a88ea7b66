"""The autoregressive model: likelihoods, masks, the preprocessor, training."""

import copy
import math

import pytest
import torch
from mmengine.optim import OptimWrapper
from mmengine.runner.checkpoint import load_state_dict
from torch import nn

from aft_mm.models import SequencePreprocessor
from aft_mm.registry import MODELS
from aft_mm.structures import SequenceSample

from ..errors import refuses, refuses_value
from ..helpers import each
from .sequence_models import D, assert_every_parameter_has_a_gradient, decoder_config, model, tokens

LENGTHS, CONTEXT = (9, 4, 1), (0, 3, 0)
HEAD = dict(type='aft_mm.CategoricalHead', embed_dims=D, num_classes=7)
TIED = dict(HEAD, tied=True)
MIXTURE = dict(type='aft_mm.LogisticMixtureHead', embed_dims=D, num_channels=1)
PIXELS = dict(type='aft_mm.PixelEmbedding', num_channels=3)


def batch(lengths=LENGTHS, context=CONTEXT) -> dict:
    samples = [SequenceSample(metainfo=dict(num_context=c)) for c in context]
    return dict(inputs=[tokens(n).to(torch.uint8) for n in lengths], data_samples=samples)


def test_the_preprocessor_pads_and_records_lengths():
    data = batch()
    out = SequencePreprocessor()(data)
    assert out['inputs'].shape == (3, 9) and out['inputs'].dtype == torch.int64
    assert [sample.length for sample in out['data_samples']] == list(LENGTHS)
    for row, sequence in zip(out['inputs'], data['inputs'], strict=True):
        assert torch.equal(row[: len(sequence)], sequence.long()) and not row[len(sequence) :].any()
    pixels = SequencePreprocessor()(dict(inputs=[tokens(n, 3) for n in (5, 2)]))
    assert pixels['inputs'].shape == (2, 5, 3)
    assert [sample.length for sample in pixels['data_samples']] == [5, 2]


def test_loss_is_the_mean_over_predicted_tokens():
    net, data = model(), batch()
    data['data_samples'][0].predicted = torch.arange(9) % 3 == 2
    out = net.data_preprocessor(data)
    log_p = net.head.logits(net(**out)).log_softmax(-1)
    terms = [
        -log_p[b, t, int(data['inputs'][b][t])]
        for b in range(3)
        for t in ((2, 5, 8) if b == 0 else range(CONTEXT[b], LENGTHS[b]))
    ]
    torch.testing.assert_close(net(**out, mode='loss')['loss'], torch.stack(terms).mean())


def test_prediction_sums_the_nats_of_each_sample():
    net, data = model(), batch()
    samples = net.val_step(data)
    assert [sample.num_dims for sample in samples] == [9, 1, 1]
    for sample, sequence, context in zip(samples, data['inputs'], CONTEXT, strict=True):
        logits = net.head.logits(net(sequence[None].long())).double()[0]
        nats = nn.functional.cross_entropy(logits, sequence.long(), reduction='none')
        assert sample.nats == pytest.approx(nats[context:].sum().item(), rel=1e-5)
    alone = net(data['inputs'][0][None].long(), mode='predict')
    assert alone[0].nats == pytest.approx(samples[0].nats) and alone[0].num_dims == 9


@pytest.mark.parametrize('values', [256, 27])
def test_a_uniform_model_has_the_log_of_the_vocabulary_as_nats(values):
    head = dict(type='aft_mm.CategoricalHead', embed_dims=D, num_classes=values)
    net = model(head, vocab_size=values)
    nn.init.zeros_(net.head.weight), nn.init.constant_(net.head.bias, 0.3)
    (sample,) = net(tokens(1, 9, high=values), mode='predict')
    assert abs(sample.nats / sample.num_dims / math.log(2) - math.log2(values)) < 1e-12


@pytest.mark.parametrize('tied', [False, True])
def test_every_parameter_gets_a_gradient(tied):
    net = model(dict(TIED, tied=tied)).train()
    net(tokens(2, 9), mode='loss')['loss'].backward()
    assert_every_parameter_has_a_gradient(net)


def test_a_tied_head_uses_the_table_of_the_embedding():
    net, x = model(TIED), tokens(2, 9)
    hidden = net(x)
    expected = hidden @ net.decoder.embedding.weight.T + net.head.bias
    torch.testing.assert_close(net.head.logits(hidden), expected)
    state = net.state_dict()
    assert [name for name in state if name.startswith('head')] == ['head.bias']
    other = model(TIED)
    load_state_dict(other, state, strict=True)
    torch.testing.assert_close(other.head.logits(other(x)), expected)
    untied = model(dict(TIED, tied=False))
    assert 'head.weight' in untied.state_dict()


def test_a_copy_of_a_tied_model_has_its_own_table():
    net, x = model(TIED), tokens(2, 9)
    twin, hidden = copy.deepcopy(net), net(x)
    expected = net.head.logits(hidden)
    nn.init.zeros_(net.decoder.embedding.weight)
    torch.testing.assert_close(twin.head.logits(hidden), expected)
    assert (net.head.logits(hidden) == net.head.bias).all()


@pytest.mark.parametrize('tied', [False, True])
def test_autocast_changes_the_loss_by_rounding_only(tied):
    net, x = model(dict(TIED, tied=tied)), tokens(2, 9)
    expected = net(x, mode='loss')['loss']
    with torch.autocast('cpu', torch.bfloat16):
        loss = net(x, mode='loss')['loss']
        assert net.generate(9, x[:, :4]).shape == (2, 9)
    assert loss.dtype == torch.float32 and loss != expected
    torch.testing.assert_close(loss, expected, rtol=0.05, atol=0)


def test_the_decoder_compiles_without_graph_breaks():
    net, x = model(), tokens(2, 9)
    expected = net(x)
    net.decoder.compile(fullgraph=True, backend='eager', dynamic=False)
    torch.testing.assert_close(net(x), expected)
    assert net.train()(x, mode='loss')['loss'].requires_grad


def test_training_learns_a_sequence():
    net = MODELS.build(
        dict(type='aft_mm.AutoregressiveModel', decoder=decoder_config(drop_rate=0.05), head=TIED)
    ).train()
    wrapper = OptimWrapper(torch.optim.AdamW(net.parameters(), lr=0.01))
    data = dict(inputs=[torch.arange(9) % 7] * 4, data_samples=[SequenceSample()] * 4)
    losses = [net.train_step(data, wrapper)['loss'].item() for _ in range(120)]
    assert abs(losses[0] - math.log(7)) < 0.2 and losses[-1] < 0.1


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int32], ids=str)
def test_tokens_may_be_integers_of_any_type(dtype):
    net, x = model(), tokens(2, 9)
    assert torch.equal(net(x.to(dtype), mode='loss')['loss'], net(x, mode='loss')['loss'])
    net = model(MIXTURE, vocab_size=256)
    assert torch.equal(net(x.to(dtype), mode='loss')['loss'], net(x, mode='loss')['loss'])


@pytest.mark.parametrize(
    'head, decoder, message',
    [
        (
            {**HEAD, 'embed_dims': 8},
            {},
            'embed_dims, got 8 of CategoricalHead and 12 of Seq.* Token',
        ),
        ({**HEAD, 'num_classes': 8}, {}, 'number of values, got 8 of Cat.* and 7 of Seq'),
        (HEAD, dict(vocab_size=8), 'number of values, got 7 of Cat.* and 8 of Seq'),
        (MIXTURE, {}, 'number of values, got 256 of LogisticMixtureHead and 7 of Seq'),
        (
            {**MIXTURE, 'num_channels': 3},
            dict(vocab_size=256),
            r'token shape, got \(3,\) of LogisticMixtureHead and \(\) of Seq.* TokenEmbedding',
        ),
        (
            MIXTURE,
            dict(embedding=PIXELS),
            r'token shape, got \(\) of Log.* and \(3,\) of Seq.* with PixelEmbedding',
        ),
    ],
    ids=str,
)
def test_a_head_that_does_not_fit_the_decoder_is_refused(head, decoder, message):
    refuses(f'must have the same {message}', model, head, **decoder)


def test_bad_input_raises_a_one_line_error():
    net, rows = model(), [tokens(4)]
    refuses("one of tensor, loss, predict, got 'train'", net, tokens(1, 4), mode='train')
    refuses('longer than the position table of 9 tokens, got 10', net, tokens(1, 10))
    for number in (3, 0):
        message = f'num_context must .* got {number} of {number} tokens'
        refuses(message, net.val_step, batch((number,), (number,)))
    message = r'must be a TokenEmbedding \[8, 12\], got a TokenEmbedding \[\d+, 12\]'
    refuses(message, model, dict(TIED, num_classes=8))
    message = r'must be a TokenEmbedding \[7, 12\], got a PixelEmbedding$'
    refuses(message, model, TIED, embedding=dict(PIXELS, num_channels=1))
    refuses(r'\[2, 3\], got .* \[2, 4\]', net.head.nats, torch.randn(2, 3, D), tokens(2, 4))
    for inputs, samples in ((tokens(3, 4), [SequenceSample()]), (tokens(1, 4), [])):
        message = f'data_samples must be one per sequence, got {len(samples)} for {len(inputs)}'
        refuses(message, net, inputs, samples, mode='loss')
    message = 'data_samples must be one per sequence, got 2 for 1'
    refuses(message, net.val_step, dict(inputs=rows, data_samples=[SequenceSample()] * 2))
    message = (
        r'inputs must be integers of one type, .* got torch.int64 \[4, 3\] after torch.int64 \[4\]'
    )
    refuses(message, net.val_step, dict(inputs=[*rows, tokens(4, 3)]))
    refuses(r'inputs .* got torch.float32 \[4\]', net.val_step, dict(inputs=[torch.randn(4)]))
    message = 'a source must be given only to an encoder, got one for 1 of 1 samples'
    refuses(message, net, tokens(1, 4), [SequenceSample(source=tokens(3))])


@each(
    'name, options',
    [
        *(
            (name, {name: value})
            for name, value in dict(
                num_layers=0,
                embed_dims=8.0,
                drop_rate=3.0,
                mlp_ratio='a',
                tokens_per_position=4,
                with_cp='no',
                token_mixer='aft_mm.AFTSimple',
                embedding=None,
                cross_mixer='softmax',
                head='aft_mm.CategoricalHead',
                encoder=3,
            ).items()
        ),
        ('num_classes', dict(head=dict(HEAD, num_classes=7.0))),
        ('tied', dict(head=dict(HEAD, tied='yes'))),
        ('head', dict(head=dict(HEAD, num_classes=6))),
    ],
)
def test_parts_of_another_type_are_refused(name, options):
    refuses_value(name, model, **options)


def test_what_are_no_tokens_is_refused():
    refuses_value(
        'decoder', MODELS.build, dict(type='aft_mm.AutoregressiveModel', head=HEAD, decoder=None)
    )
    for wrong in (None, 'ab', tokens(6)):
        refuses_value('inputs', model(), wrong)
    for wrong in (torch.zeros(2, 6), tokens(2, 6).bool(), tokens(2, 6) + 7, tokens(2, 6) - 7):
        refuses_value('a token', model(), wrong)
