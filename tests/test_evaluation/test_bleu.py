"""BLEU, compared with sacrebleu."""

import json
import logging
import sys

import pytest
from mmengine.evaluator import Evaluator
from mmengine.logging import MMLogger
from mmengine.registry import METRICS

from aft_mm.evaluation import BLEU
from aft_mm.structures import SequenceSample

from ..errors import refuses
from ..parallel_data import MISSING, REASON

sacrebleu = pytest.importorskip('sacrebleu', reason='sacrebleu computes the scores of these tests')
pytestmark = pytest.mark.skipif(bool(MISSING), reason=REASON)
PAIRS = [
    ('The cat sat on the mat.', 'The cat sat on the mat.'),
    ('A dog runs quickly in the park', 'A dog is running quickly in the park.'),
    ('', 'Two men sleep.'),
]


def evaluate(pairs, **options):
    evaluator = Evaluator(METRICS.build(dict(type='aft_mm.BLEU', **options)))
    for translation, reference in pairs:
        evaluator.process(
            [SequenceSample(metainfo=dict(translation=translation, reference=reference))]
        )
    return evaluator.evaluate(len(pairs))


@pytest.fixture
def messages():
    logger = MMLogger.get_instance('bleu')
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_bleu_is_that_of_the_corpus_and_its_signature_is_logged(messages):
    metrics = evaluate(PAIRS)
    expected = sacrebleu.corpus_bleu(*[[pair[0] for pair in PAIRS], [[pair[1] for pair in PAIRS]]])
    assert 20 < metrics['bleu'] == expected.score < 60
    assert metrics['bleu_length_ratio'] == expected.sys_len / expected.ref_len < 1
    (line,) = [line for line in messages if line.startswith('BLEU|nrefs:1|case:mixed')]
    assert 'tok:13a' in line and f'= {expected.score:.2f} ' in line
    json.dumps(metrics)


def test_a_perfect_translation_has_100_and_case_matters():
    assert evaluate(PAIRS[:1])['bleu'] == pytest.approx(100)
    assert evaluate([(PAIRS[0][0].lower(), PAIRS[0][1])])['bleu'] < 100


def test_text_without_spaces_needs_its_tokenizer(messages):
    pairs = [('我喜欢看书和听音乐。', '我喜欢看书听音乐。'), ('今天天气非常好。', '今天天气很好。')]
    assert evaluate(pairs)['bleu'] == 0
    assert "the references have not: set tokenize, got '13a'" in ' '.join(messages)
    messages.clear()
    texts = [text for text, _ in pairs], [[reference for _, reference in pairs]]
    expected = sacrebleu.corpus_bleu(*texts, tokenize='zh').score
    assert 30 < expected == evaluate(pairs, tokenize='zh')['bleu'] < 90
    assert evaluate(PAIRS, lowercase=True)['bleu'] == evaluate(PAIRS)['bleu']
    shouted = [(text.upper(), reference) for text, reference in PAIRS]
    assert evaluate(shouted, lowercase=True)['bleu'] > evaluate(shouted)['bleu']
    divided = [(' '.join(reference), ' '.join(reference)) for _, reference in pairs]
    assert evaluate(divided)['bleu'] == pytest.approx(100)
    assert 'set tokenize' not in ' '.join(messages)
    refuses('tokenize must be .*zh.*, got .words', BLEU, tokenize='words')


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'sacrebleu', None)
    with pytest.raises(ValueError, match=r'BLEU needs sacrebleu, which pip install aft_mm\[text\]'):
        BLEU()


def test_samples_without_a_translation_are_named():
    metric = METRICS.build(dict(type='aft_mm.BLEU'))
    with pytest.raises(ValueError, match='BLEU needs samples with a translation.*TestLoop'):
        metric.process(None, [dict(reference='a', nats=1.0)])
