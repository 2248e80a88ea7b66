"""CTC against the sum over all alignments, and padded batches against single utterances."""

import math
import re
from collections import defaultdict
from itertools import groupby, product

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope
from torch.nn.functional import conv1d, pad

from aft_mm.models.decoding.ctc import Lexicon, decode_by_beam, decode_greedily
from aft_mm.structures import UtteranceSample
from aft_mm.tokenizers import TextUnits

from ..errors import refuses
from ..helpers import each

MIXERS = {
    'AFTFull': dict(rank=8),
    'AFTFull-free': dict(rank=None),
    'AFTLocal': dict(window=7, rank=8),
    'AFTLocalLearned': dict(window=7, rank=8),
    'AFTSimple': dict(),
    'AFTConv': dict(num_heads=4, kernel_size=9),
    'AFTLocalHard': dict(window=8),
    'SoftmaxAttention': dict(num_heads=4),
    'LinearAttention': dict(num_heads=4),
    'LSHAttention': dict(num_heads=4, num_rounds=2, num_buckets=8, chunk_size=16),
    'PerformerAttention': dict(num_heads=4),
    'DenseSynthesizer': dict(num_heads=4),
    'LocalSoftmaxAttention': dict(num_heads=4, window=8),
}
LENGTHS = (63, 7, 1, 40)


def build(mixer='AFTSimple', beam_size=1, num_classes=7, head_dims=32, **options):
    init_default_scope('aft_mm')
    torch.manual_seed(0)
    frames = dict(type='FrameEmbedding', num_features=13)
    if mixer.endswith('-conv'):
        frames = dict(type='ConvFrameEmbedding', num_features=13)
        mixer = mixer.removesuffix('-conv')
    if mixer == 'tdnn':
        encoder = dict(type='TDNNEncoder', num_features=13, embed_dims=32)
    elif mixer == 'lstm':
        encoder = dict(type='BiLSTMEncoder', num_features=13, hidden_dims=16, num_layers=3)
    else:
        config = dict(type=mixer.partition('-')[0], **MIXERS[mixer])
        encoder = dict(
            type='SequenceEncoder',
            embed_dims=32,
            num_layers=3,
            grid=(64,),
            token_mixer=config,
            embedding=frames,
        )
    head = dict(type='CTCHead', embed_dims=head_dims, num_classes=num_classes)
    model = MODELS.build(
        dict(type='CTCModel', encoder=encoder, head=head, beam_size=beam_size, **options)
    ).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def batch(lengths, units, model):
    torch.manual_seed(1)
    samples = [UtteranceSample(metainfo=dict(units=target)) for target in units]
    inputs = [torch.randn(length, 13) for length in lengths]
    return model.data_preprocessor(dict(inputs=inputs, data_samples=samples), training=True)


def all_transcripts(log_probs):
    probs, found = log_probs.double().exp(), defaultdict(float)
    for path in product(range(probs.shape[1]), repeat=len(probs)):
        units = tuple(unit for unit, _ in groupby(path) if unit)
        found[units] += math.prod(probs[t, unit].item() for t, unit in enumerate(path))
    return found


@pytest.mark.parametrize('mixer', [*MIXERS, 'AFTConv-conv', 'lstm', 'tdnn'])
def test_a_padded_batch_equals_single_utterances(mixer):
    model = build(mixer)
    units = [(1, 2, 2, 5), (3,), (4,), ()]
    data = batch(LENGTHS, units, model)
    if mixer in ('AFTConv-conv', 'tdnn', 'SoftmaxAttention'):
        # The order of their sums depends on the length, which shows in float32.
        model, data['inputs'] = model.double(), data['inputs'].double()
    together = model(**data)
    nats = model.head.nats(together, LENGTHS, units)
    for index, length in enumerate(LENGTHS):
        alone = model(data['inputs'][index : index + 1, :length])
        torch.testing.assert_close(together[index, :length], alone[0], rtol=0, atol=2e-6)
        loss = model.head.nats(alone, [length], units[index : index + 1])[0]
        torch.testing.assert_close(nats[index], loss, rtol=2e-6, atol=2e-5)
    loss = model(**data, mode='loss')['loss']
    torch.testing.assert_close(loss, nats.sum() / 6)


def test_a_tdnn_is_dilated_convolutions():
    init_default_scope('aft_mm')
    model = MODELS.build(
        dict(type='TDNNEncoder', num_features=13, embed_dims=8, kernel_size=3, dilations=(1, 4))
    ).eval()
    x = features = torch.randn(2, 20, 13)
    x = x.mT
    for (convolution, norm, *_), dilation in zip(model.layers, (1, 4), strict=True):
        norm.running_mean.normal_()
        weight, bias = convolution.weight, convolution.bias
        x = conv1d(pad(x, (dilation, dilation)), weight, bias, dilation=dilation)
        x = ((x.mT - norm.running_mean) / (norm.running_var + norm.eps).sqrt()).relu().mT
    torch.testing.assert_close(model(features), x.mT)


def test_a_conformer_reads_padding_in_its_convolutions_only():
    init_default_scope('aft_mm')
    encoder = dict(type='ConformerEncoder', num_features=13, embed_dims=16)
    features, mask = torch.randn(2, 63, 13), torch.arange(63) < torch.tensor([[63], [31]])
    changed = torch.where(mask[..., None], features, 1e3)
    for kernel_size in (1, 15):
        model = MODELS.build(dict(encoder, kernel_size=kernel_size)).eval()
        batch = model(features, mask)
        torch.testing.assert_close(batch[:1], model(features[:1]))
        torch.testing.assert_close(model(changed, mask)[mask], batch[mask])
        alone = model(features[1:, :31])
        assert torch.allclose(batch[1:, :31], alone, atol=1e-5) == (kernel_size == 1)


@each('kind', ['BiLSTMEncoder', 'TDNNEncoder', 'ConformerEncoder'])
def test_drop_rate_drops_what_layers_return(kind):
    init_default_scope('aft_mm')
    plain, model = (
        MODELS.build(dict(type=kind, num_features=13, drop_rate=rate)) for rate in (0.0, 1.0)
    )
    model.load_state_dict(plain.state_dict())
    one, two = torch.randn(2, 3, 7, 13)
    assert torch.equal(model.eval()(one), plain.eval()(one))
    assert not torch.allclose(plain(one), plain(two), atol=1e-3)
    if kind == 'ConformerEncoder':  # its layers are residual: their last norms remain
        expected = model.projection(one)
        for layer in model.conformer['conformer_layers']:
            expected = layer.final_layer_norm(expected)
    else:
        expected = model.train()(two) if kind == 'BiLSTMEncoder' else torch.zeros(3, 7, 128)
    torch.testing.assert_close(model.train()(one), expected)


def test_arguments_of_the_encoders_are_checked():
    init_default_scope('aft_mm')
    for wrong, message in (
        (dict(num_heads=5), 'num_heads must be a divisor of embed_dims, 96, got 5'),
        (dict(kernel_size=4), 'kernel_size must be odd, got'),
        (dict(num_layers=0), 'num_layers must be an int, 1 or larger, got 0'),
    ):
        refuses(message, MODELS.build, dict(type='ConformerEncoder', num_features=13, **wrong))
    hidden = build('lstm').encoder(torch.randn(2, 5, 13), torch.zeros(2, 5, dtype=torch.bool))
    assert hidden.shape == (2, 5, 32) and hidden.isfinite().all()


@pytest.mark.parametrize('mixer', ['AFTConv', 'AFTConv-conv', 'lstm', 'tdnn'])
def test_padding_changes_neither_loss_nor_gradients(mixer):
    model = build(mixer)
    data = batch(LENGTHS, [(1,), (3,), (4,), ()], model)
    found = []
    for padding in (0.0, 1e4):
        for index, length in enumerate(LENGTHS):
            data['inputs'][index, length:] = padding
        loss = model(**data, mode='loss')['loss']
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        found.append({'loss': loss, **gradients})
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('frames', [1, 4, 6])
def test_loss_and_beam_equal_the_sum_over_all_alignments(frames):
    torch.manual_seed(frames)
    log_probs = (2 * torch.randn(frames, 4, dtype=torch.float64)).log_softmax(-1)
    found = all_transcripts(log_probs)
    assert sum(found.values()) == pytest.approx(1)
    head = build(num_classes=4).head
    for units, probability in found.items():
        nats = head.nats(log_probs[None], [frames], [units])
        assert nats.item() == pytest.approx(-math.log(probability), rel=1e-9)

    ranked = sorted(found, key=found.get, reverse=True)
    best = decode_by_beam(log_probs, len(found))
    assert [one.units for one in best] == ranked
    for one in best:
        assert one.score == pytest.approx(math.log(found[one.units]), rel=1e-9)
    # A narrow beam never overestimates a probability.
    for one in decode_by_beam(log_probs, 2):
        assert one.score <= math.log(found[one.units]) + 1e-9


def test_the_beam_sums_alignments_where_greedy_takes_the_best():
    # Two blanks are the most likely alignment, 0.36, but unit 1 has 0.64 in total.
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()
    assert decode_greedily(log_probs) == ((), pytest.approx(2 * math.log(0.6)))
    first, second = decode_by_beam(log_probs, 4)
    assert first == ((1,), pytest.approx(math.log(0.64), rel=1e-6))
    assert second == ((), pytest.approx(math.log(0.36), rel=1e-6))
    # No alignment of the first frame with unit 1 is a blank.
    certain = torch.tensor([[0, 1, 0], [0.5, 0, 0.5]]).log()
    found = decode_by_beam(certain, 4)
    assert [one.units for one in found] == [(1,), (1, 2)]


@pytest.mark.parametrize('separator', [3, None])
def test_a_lexicon_leaves_the_transcripts_of_its_words(separator):
    torch.manual_seed(0)
    log_probs = (2 * torch.randn(6, 4, dtype=torch.float64)).log_softmax(-1)
    words = [(1,), (1, 2), (2, 2)]
    gap = () if separator is None else (separator,)
    allowed = set(words)
    for _ in range(3):
        allowed |= {left + gap + right for left in allowed for right in words}
    found = {units: p for units, p in all_transcripts(log_probs).items() if units in allowed}
    best = decode_by_beam(log_probs, 10**6, Lexicon(words, separator))
    assert [one.units for one in best] == sorted(found, key=found.get, reverse=True)
    for one in best:
        assert one.score == pytest.approx(math.log(found[one.units]), rel=1e-9)
    refuses('words must be one or more of one or more units', Lexicon, [()], separator)


def test_predictions_with_a_lexicon_are_its_words():
    units = dict(symbols='abcde', case='lower')
    model = build()
    model.lexicon = Lexicon.of(['ab', 'Cad'], TextUnits(**units))
    samples = model(**batch(LENGTHS, [()] * 4, model), mode='predict')
    for sample in samples:
        assert not re.sub('ab|cad', '', TextUnits(**units).decode(sample.in_lexicon))
    assert [bool(sample.in_lexicon) for sample in samples] == [True, True, False, True]  # 1 frame
    message = "words must be written in the units, which lack 'x'"
    refuses(message, Lexicon.of, ['axe'], TextUnits(**units))
    for words in ('ab', ['ab', 5], 5):
        refuses('words must be a list of texts, got', Lexicon.of, words, TextUnits(**units))
    message = 'lexicon must be a dict of units and words, got'
    for lexicon in (dict(words=['ab']), ['ab']):
        refuses(message, build, lexicon=lexicon)


def test_arrays_are_decoded_and_other_than_log_probabilities_are_refused():
    torch.manual_seed(0)
    logits = 3 * torch.randn(7, 300)
    log_probs = logits.log_softmax(-1)
    for decode in (decode_greedily, lambda given: decode_by_beam(given, 3)[0]):
        expected = decode(log_probs)
        for given in (log_probs.numpy(), log_probs.tolist(), log_probs.double()):
            assert decode(given).units == expected.units
            assert decode(given).score == pytest.approx(expected.score, rel=1e-5)
        for dtype in (torch.float16, torch.bfloat16):
            decode(logits.to(dtype).log_softmax(-1))
            decode(torch.zeros(2, 9000, dtype=dtype).log_softmax(-1))
        allowed = log_probs.clone()
        allowed[:, 1:200] = -torch.inf  # units that are forbidden
        assert min(decode(allowed).units) >= 200
        assert decode(log_probs.numpy()[::-1]).units == decode(log_probs.flip(0)).units
        message = 'log_probs must be log probabilities, whose exponentials sum to at most 1 .* got a sum of '
        last = log_probs.clone()
        last[-1] = log_probs[-1].exp()
        for wrong in (log_probs.exp(), logits, -log_probs, last):
            refuses(message, decode, wrong)
        for wrong in ('ab', None, log_probs.numpy()[0]):
            refuses(r'log_probs must be a tensor or array \[T, V\]', decode, wrong)


def test_greedy_takes_the_best_alignment_without_repetitions_and_blanks():
    path = [0, 3, 3, 0, 3, 1, 1, 2, 0]
    log_probs = torch.full((9, 4), 0.1)
    log_probs[range(9), path] = 0.7
    assert decode_greedily(log_probs.log()).units == (3, 3, 1, 2)


def test_predictions_ignore_padding_and_use_the_beam():
    units = [(1,), (2,), (3,), (4,)]
    greedy, beam = build(), build(beam_size=5)
    data = batch(LENGTHS, units, greedy)
    log_probs = greedy(**data)
    for model, decode in ((greedy, decode_greedily), (beam, lambda x: decode_by_beam(x, 5)[0])):
        for index, sample in enumerate(model(**data, mode='predict')):
            best = decode(log_probs[index, : LENGTHS[index]])
            assert sample.recognized == list(best.units)
            assert sample.score == pytest.approx(best.score)


def test_log_probabilities_of_bfloat16_logits_are_those_in_float32():
    head, hidden = build().head, torch.randn(2, 5, 32)
    log_probs = head.bfloat16().log_probs(hidden.bfloat16())
    logits = head.proj(hidden.bfloat16())
    assert log_probs.dtype == torch.float32
    assert torch.equal(log_probs, logits.float().log_softmax(-1))


def test_bad_input_raises_a_one_line_error():
    model = build()
    message = '3 units, 1 of them repeated, must have 4 frames .* 3'
    refuses(message, model, **batch([3], [(1, 2, 2)], model), mode='loss')
    for unit, shown in ((7, '1 to 7'), (0, '0 to 1'), (-1, '-1 to 1')):
        message = f'units must be 1 to 6, got {shown}'
        refuses(message, model, **batch([9], [(1, unit)], model), mode='loss')
    refuses('table of 64 tokens, got 65', model, torch.randn(1, 65, 13))
    wide = torch.randn(1, 5, 12)
    refuses(r'frames must be a tensor of floats \[B, T, 13\]', model, wide)
    refuses(r'features must be a tensor \[B, T, 13\]', build('lstm'), wide)
    message = 'inputs must be floats .* of one frame or more'
    refuses(message, batch, [3, 0], [(1,), (2,)], model)
    refuses('log_probs must be finite', decode_by_beam, torch.full((2, 3), math.nan), 2)
    refuses(r'log_probs must be a tensor or array \[T, V\]', decode_by_beam, torch.zeros(3), 2)
    frames = [torch.randn(5, 13), torch.randn(4, 13)]
    samples = [UtteranceSample()]
    message = 'data_samples must be one per utterance, got 1 for 2'
    refuses(message, model, torch.randn(2, 5, 13), samples)
    collate = model.data_preprocessor
    refuses(message, collate, dict(inputs=frames, data_samples=samples))
    refuses('inputs must be one utterance or more, got none', collate, dict(inputs=[]))
    message = r'inputs must be floats \[T, 13\] as the first'
    refuses(message, collate, dict(inputs=[frames[0], torch.randn(4, 12)]))
    collated = collate(dict(inputs=frames))
    assert [sample.length for sample in collated['data_samples']] == [5, 4]
    refuses('head and encoder must have the same embed_dims, got 9 and 32', build, head_dims=9)
