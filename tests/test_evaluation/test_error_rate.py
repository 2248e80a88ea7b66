"""Error rates of speech recognition, compared with explicit edit distances."""

import numpy as np
import pytest

from aft_mm.evaluation import ErrorRate

jiwer = pytest.importorskip('jiwer', reason='jiwer counts the errors')

NAMES = ('<blank>', '<unk>', ' ', 'a', 'b', 'c', '.')


def distance(one, other):
    table = np.add.outer(np.arange(len(one) + 1), np.arange(len(other) + 1))
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1, j + 1] = min(
                table[i, j] + (a != b), table[i, j + 1] + 1, table[i + 1, j] + 1
            )
    return table[-1, -1]


def measure(per, pairs, **meta):
    metric = ErrorRate(per)
    metric.dataset_meta = dict(units=NAMES, **meta)
    metric.process(None, [dict(units=units, recognized=found) for units, found in pairs])
    return metric.compute_metrics(metric.results)


@pytest.mark.parametrize('per', ['phoneme', 'character', 'word'])
def test_rates_are_edit_distances_over_the_transcripts(per):
    rng = np.random.default_rng(0)
    pairs = [
        [tuple(rng.integers(1, 7, rng.integers(0, 20)).tolist()) for _ in range(2)]
        for _ in range(40)
    ]

    def side(units):
        text = ''.join(NAMES[u] for u in units)
        if per == 'character':
            return text.strip().replace('<unk>', '?')
        return text.split() if per == 'word' else units

    sides = [[side(units) for units in pair] for pair in pairs]
    total = sum(len(reference) for reference, _ in sides)
    errors = sum(distance(*pair) for pair in sides)
    found = measure(per, pairs)
    assert found.pop(f'{per}_error_rate') == pytest.approx(100 * errors / total)
    assert sum(found.values()) == pytest.approx(100 * errors / total)
    if per == 'character':
        assert 100 * jiwer.cer(*map(list, zip(*sides, strict=True))) == pytest.approx(
            100 * errors / total
        )


def test_the_lexicon_has_transcripts_of_its_own():
    metric = ErrorRate('phoneme', lexicon=True)
    metric.dataset_meta = dict(units=NAMES)
    metric.process(None, [dict(units=(3, 4), recognized=(3, 4), in_lexicon=(3, 5))])
    assert metric.evaluate(1)['lexicon/phoneme_error_rate'] == 50


def test_kinds_of_errors():
    found = measure('phoneme', [((3, 4, 5), (3, 5)), ((3,), (4, 3, 5)), ((), (3,)), ((4,), (5,))])
    assert found == dict(
        phoneme_error_rate=100,
        phoneme_substitutions=20,
        phoneme_deletions=20,
        phoneme_insertions=60,
    )


def test_a_word_may_be_one_letter():
    found = measure('word', [((3, 4, 5), (3, 5, 5))], in_words=True)
    assert found['word_error_rate'] == pytest.approx(100 / 3)
    assert measure('word', [((3, 4, 5), (3, 5, 5))])['word_error_rate'] == 100


def test_bad_input_is_named():
    with pytest.raises(ValueError, match='all 1 transcripts are empty'):
        measure('word', [((), (3,))])
    with pytest.raises(ValueError, match='per must be one of phoneme, character, word'):
        ErrorRate('letter')
    with pytest.raises(ValueError, match='needs a dataset with units'):
        ErrorRate('word').process(None, [dict(units=(), recognized=[])])
    metric = ErrorRate('word', lexicon=True)
    metric.dataset_meta = dict(units=NAMES)
    with pytest.raises(ValueError, match='needs samples with in_lexicon'):
        metric.process(None, [dict(units=(), recognized=[])])
