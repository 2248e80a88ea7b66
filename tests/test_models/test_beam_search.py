"""Beam search, padded sources, label smoothing, shared tables."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from aft_mm.models import CategoricalHead, SequenceDecoder, beam_search
from aft_mm.registry import MODELS
from aft_mm.structures import SequenceSample

from ..errors import refuses
from .sequence_models import MIXERS, D, all_mixers, decoder_config, mixer, model, randomize, tokens

END, VALUES = 2, 4
SIZES = (3, 6, 1)
SOFTMAX = dict(type='aft_mm.SoftmaxAttention', num_heads=3)
HEAD = dict(type='aft_mm.CategoricalHead', embed_dims=D, num_classes=VALUES)
ENCODER = dict(
    type='aft_mm.SequenceEncoder',
    embed_dims=D,
    num_layers=1,
    grid=(6,),
    embedding=None,
    token_mixer=SOFTMAX,
)
TWO_WAY = {name: mixer(name) for name in MIXERS}
TWO_WAY['LambdaLayer'] = dict(type='aft_mm.LambdaLayer', num_heads=3)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def translation_model(token_mixer=SOFTMAX, encoder_mixing=SOFTMAX, length=8, **options):
    return model(
        HEAD,
        dict(ENCODER, token_mixer=encoder_mixing),
        grid=(length,),
        vocab_size=VALUES,
        num_kinds=1,
        token_mixer=token_mixer,
        cross_mixer=SOFTMAX,
        **options,
    )


def sources():
    return [tokens(size, high=VALUES) for size in SIZES]


def ranking(net, source, longest, alpha):
    """Return all sequences of up to `longest` tokens with their scores, best first."""
    words = [value for value in range(VALUES) if value != END]
    found = []
    for size in range(longest):
        rows = [(*row, END) for row in itertools.product(words, repeat=size)]
        samples = [SequenceSample(source=source) for _ in rows]
        for row, sample in zip(rows, net(torch.tensor(rows), samples, 'predict'), strict=True):
            found.append((-sample.nats / ((5 + len(row)) / 6) ** alpha, row[:-1]))
    return sorted(found, reverse=True)


def test_a_wide_beam_equals_exhaustive_search():
    net, given = translation_model(**all_mixers()), sources()
    # Two tokens and any third, which may end the sequence: 9 · 4 continuations.
    found = net.beam_search(given, END, beam_size=36, num_best=5, length_penalty=0.7, max_length=4)
    for source, hypotheses in zip(given, found, strict=True):
        expected = ranking(net, source, 4, 0.7)[:5]
        assert [tuple(h.tokens.tolist()) for h in hypotheses] == [row for _, row in expected]
        for h, (score, row) in zip(hypotheses, expected, strict=True):
            assert h.score == pytest.approx(score, abs=1e-5)
            assert -h.nats == pytest.approx(score * ((5 + len(row) + 1) / 6) ** 0.7, abs=1e-5)


def best_of_beam(net, source, width, longest, alpha):
    """Return the best sequence of a beam that only ends when it is empty."""
    rows, found = [()], []
    for size in range(1, longest + 1):
        last = [END] if size == longest else range(VALUES)
        rows = [(*row, value) for row in rows for value in last]
        samples = [SequenceSample(source=source) for _ in rows]
        nats = [sample.nats for sample in net(torch.tensor(rows), samples, 'predict')]
        kept = sorted(zip(nats, rows, strict=True))[: width - len(found)]
        found += [(n / ((5 + size) / 6) ** alpha, row) for n, row in kept if row[-1] == END]
        rows = [row for _, row in kept if row[-1] != END]
        if not rows:
            break
    return min(found)[1][:-1]


def test_the_search_neither_stops_early_nor_widens():
    for seed in range(12):
        torch.manual_seed(seed)
        net, given = translation_model(), sources()
        options = dict(beam_size=3, length_penalty=4, max_length=4)
        for source, (best,) in zip(given, net.beam_search(given, END, **options), strict=True):
            assert tuple(best.tokens.tolist()) == best_of_beam(net, source, 3, 4, 4)


def test_beams_of_bfloat16_logits_are_those_in_float32(monkeypatch):
    net, given = translation_model(), sources()
    logits = CategoricalHead.logits
    found = []
    for cast in (torch.Tensor.bfloat16, lambda x: x.bfloat16().float()):
        monkeypatch.setattr(CategoricalHead, 'logits', lambda *args, c=cast: c(logits(*args)))
        found.append(net.beam_search(given, END, num_best=3, max_length=8))
    for one, other in zip(*found, strict=True):
        assert [(h.tokens.tolist(), h.score) for h in one] == [
            (h.tokens.tolist(), h.score) for h in other
        ]


def test_a_beam_of_one_is_greedy():
    net, given = translation_model(**all_mixers()), sources()
    greedy = net.generate(8, source=given, greedy=True, end_token=END)
    for row, (best,) in zip(
        greedy.tolist(), net.beam_search(given, END, beam_size=1, max_length=8), strict=True
    ):
        assert best.tokens.tolist() == (row[: row.index(END)] if END in row else row[:7])


def test_beams_do_not_depend_on_the_batch_and_scores_are_right():
    net, given = translation_model(mixer('AFTLocal'), length=40), sources()
    together = net.beam_search(given, END, beam_size=3, num_best=3)
    for source, hypotheses in zip(given, together, strict=True):
        (alone,) = net.beam_search([source], END, beam_size=3, num_best=3)
        assert len(hypotheses) == 3
        for one, other in zip(alone, hypotheses, strict=True):
            assert torch.equal(one.tokens, other.tokens)
            assert one.score == pytest.approx(other.score, abs=1e-5)
            row = torch.cat([one.tokens, torch.tensor([END])])
            (sample,) = net(row[None], [SequenceSample(source=source)], 'predict')
            assert sample.nats == pytest.approx(one.nats, abs=1e-4)
        # At most 2 S + 10 tokens, including the end.
        assert max(len(h.tokens) for h in hypotheses) < 2 * len(source) + 10
        scores = [h.score for h in hypotheses]
        assert scores == sorted(scores, reverse=True)


def test_each_option_of_the_beam_changes_the_result():
    net, given = translation_model(length=40), [tokens(6, high=VALUES) for _ in range(8)]
    with torch.no_grad():
        net.head.bias[END] -= 2

    def lengths(**options):
        return [len(best.tokens) for best, *_ in net.beam_search(given, END, **options)]

    assert sum(lengths(length_penalty=2.0)) > sum(lengths(length_penalty=0.0))
    assert max(lengths(max_length=3, length_penalty=2.0)) == 2
    narrow, wide = (net.beam_search(given, END, beam_size=k, length_penalty=0.0) for k in (1, 6))
    gains = [b.score - a.score for (a, *_), (b, *_) in zip(narrow, wide, strict=True)]
    assert max(gains) > 1e-3


def test_the_search_stops_when_no_result_can_improve(monkeypatch):
    net, given = translation_model(length=40), sources()
    with torch.no_grad():
        net.head.bias[END] += 9  # the end token is almost certain
    steps = []
    step = SequenceDecoder.step
    monkeypatch.setattr(
        SequenceDecoder, 'step', lambda *args: steps.append(len(args[1])) or step(*args)
    )
    for (best,) in net.beam_search(given, END):
        assert not len(best.tokens)
    assert len(steps) <= 1
    net.generate(40, source=given, end_token=END, seed=0)
    assert len(steps) < 10


def test_samples_are_filled_with_the_end_token():
    net, given = translation_model(length=30), [tokens(4, high=VALUES) for _ in range(20)]
    generated = net.generate(30, source=given, end_token=END, seed=0)
    free = net.generate(30, source=given, seed=0)
    for row, other in zip(generated.tolist(), free.tolist(), strict=True):
        first = row.index(END) if END in row else 30
        assert row[:first] == other[:first] and set(row[first:]) <= {END}
    assert len({row.index(END) for row in generated.tolist() if END in row}) > 2


@pytest.mark.parametrize('mixing', TWO_WAY.values(), ids=TWO_WAY)
def test_a_padded_batch_equals_single_sentences(mixing):
    net, given = translation_model(mixer('AFTSimple'), mixing), sources()
    rows = [tokens(size, high=VALUES) for size in (8, 2, 5)]
    batch = dict(inputs=rows, data_samples=[SequenceSample(source=source) for source in given])
    with torch.no_grad():
        together = net(**net.data_preprocessor(batch), mode='predict')
        for row, source, sample in zip(rows, given, together, strict=True):
            (alone,) = net(row[None], [SequenceSample(source=source)], 'predict')
            assert sample.num_dims == len(row)
            assert sample.nats / len(row) == pytest.approx(alone.nats / len(row), abs=2e-6)
            memory, mask = net.encode(given)
        for source, padded, real in zip(given, memory, mask, strict=True):
            (one,), _ = net.encode([source])
            torch.testing.assert_close(padded[real], one, atol=2e-6, rtol=2e-6)


def test_label_smoothing_changes_the_loss_and_not_the_likelihood():
    torch.manual_seed(0)
    hidden, targets = torch.randn(3, 5, D), tokens(3, 5)
    head = randomize(CategoricalHead(D, 7, label_smoothing=0.1))
    plain = CategoricalHead(D, 7)
    plain.load_state_dict(head.state_dict())
    log_p = head.logits(hidden).log_softmax(-1)
    expected = -(0.9 * log_p.gather(-1, targets[..., None]).squeeze(-1) + 0.1 * log_p.mean(-1))
    torch.testing.assert_close(head.loss(hidden, targets), expected)
    torch.testing.assert_close(head.nats(hidden, targets), plain.nats(hidden, targets))
    torch.testing.assert_close(plain.loss(hidden, targets), plain.nats(hidden, targets))
    for wrong in (-0.1, 1.5, True):
        message = 'label_smoothing must be a finite number, 0 to 1'
        refuses(message, CategoricalHead, D, 7, label_smoothing=wrong)


def test_the_loss_of_a_batch_is_smoothed_and_ignores_padding():
    head = {**HEAD, 'label_smoothing': 0.3}
    net, row = translation_model(), tokens(1, 5, high=VALUES)
    net.head = randomize(MODELS.build(head))
    samples = [SequenceSample(metainfo=dict(length=3), source=tokens(4, high=VALUES))]
    hidden = net(row, samples)
    expected = F.cross_entropy(net.head.logits(hidden)[0, :3], row[0, :3], label_smoothing=0.3)
    torch.testing.assert_close(net(row, samples, 'loss')['loss'], expected)


def test_source_target_and_output_share_one_table():
    net = translation_model()
    table = net.decoder.embedding.weight
    assert net.encoder.embedding is net.decoder.embedding
    names = [name for name, parameter in net.named_parameters() if parameter.shape == table.shape]
    assert (
        names
        == ['decoder.embedding.weight', 'head.weight']
        == [name for name in net.state_dict() if name in names]
    )
    before = net.encode([tokens(3, high=VALUES)])[0]
    with torch.no_grad():
        table.mul_(2)
    torch.manual_seed(1)
    assert not torch.equal(net.encode([tokens(3, high=VALUES)])[0], before)
    refuses('embedding must be given for a decoder', MODELS.build, decoder_config(embedding=None))
    wide = dict(ENCODER, embed_dims=2 * D)
    message = 'must have the same embed_dims, got 24 and 12'
    refuses(message, model, HEAD, wide, vocab_size=VALUES, num_kinds=1, cross_mixer=SOFTMAX)


def test_sinusoidal_positions_follow_their_formula_and_are_not_saved():
    options = dict(positions='sinusoidal', grid=(9,))
    stack = MODELS.build(decoder_config(**options))
    table = stack.position_embedding()
    for t, i in itertools.product(range(9), range(D // 2)):
        angle = t / 10000 ** (2 * i / D)
        assert table[t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert table[t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert not any('position' in name for name in stack.state_dict())
    learned = MODELS.build(decoder_config(grid=(9,)))
    assert learned.state_dict().keys() - stack.state_dict().keys() == {'position_embedding.weight'}
    for wrong, message in [
        (dict(grid=(3, 3)), 'grid of sinusoidal positions must be 1 ints'),
        (dict(embed_dims=9), 'embed_dims with sinusoidal positions must be even, got 9'),
        (dict(positions='fixed'), 'positions must be one of learned, sinusoidal, none'),
    ]:
        refuses(message, MODELS.build, decoder_config(**{**options, **wrong}))


def test_a_scaled_embedding_has_the_norm_of_the_positions():
    table = MODELS.build(
        dict(type='aft_mm.TokenEmbedding', embed_dims=64, vocab_size=500, scaled=True)
    )
    row = tokens(1, 9, high=500)
    torch.testing.assert_close(table(row), 8 * table.weight[row])
    assert table(row).std().item() == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(beam_size=0), 'beam_size must be an int, 1 or larger, got 0'),
        (dict(num_best=5), 'num_best must be an int, 1 to 4, got 5'),
        (dict(length_penalty=-1), 'length_penalty must be a finite number, 0 to 10, got -1'),
        (dict(length_penalty=1e3), 'length_penalty must be a finite number, 0 to 10, got 1000.0'),
        (dict(max_length=0), 'max_length must be an int, 1 or larger, got 0'),
        (dict(end_token=VALUES), 'end_token must be an int, 0 to 3, got 4'),
        (dict(source=[]), "agree and be 1 or more, got {'source': 0}"),
        (dict(source=[torch.tensor([VALUES])]), 'a token must be 0 to 3, got 4'),
        (dict(source=[torch.zeros(7).long()]), 'longer than the position table of 6 tokens, got 7'),
    ],
    ids=str,
)
def test_bad_options_raise_a_one_line_error(options, message):
    options = {'source': sources(), 'end_token': END, **options}
    refuses(message, beam_search, translation_model(), **options)


def test_nan_weights_raise_a_one_line_error():
    net = translation_model()
    with torch.no_grad():
        net.head.bias[0] = torch.nan
    refuses('logits must be finite, got NaN', net.beam_search, sources(), END)
