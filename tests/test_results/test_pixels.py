"""The table and sentences on the pixels of CIFAR-10 are those of the runs."""

from ..documents import text_of
from .shown import (
    MIXERS,
    TOP1,
    Claim,
    holm,
    mean_and_half,
    milliseconds,
    reprinted,
    rows_of,
    runs,
    values,
)

FOLDER = 'cifar10_full_pixels'
SECONDS, BATCH = 420, 16
MODELS = {
    'AFT-conv': 'aft-conv-*_seed?',
    'AFT-simple': 'aft-simple-*_seed?',
    'linear attention': 'linear-*_seed?',
    'softmax attention': 'deit-*_seed?',
    'depthwise convolution': 'depthwise-*_seed?',
}
FIRST, *OTHERS = MODELS.values()


def chosen_rate(pattern):
    """Return the rate with the higher accuracy in the short runs."""
    short = runs(FOLDER, pattern.replace('seed?', 'lr0.00[13]'))
    assert {run['lr'] for run in short} == {1e-3, 3e-3}
    return max(short, key=lambda run: run['metrics'][TOP1])['lr']


def leads():
    found = {other: Claim((FOLDER, TOP1), FIRST, other) for other in OTHERS}
    return found, holm({other: lead.p for other, lead in found.items()})


def test_the_table_of_pixels():
    claims, p = leads()
    rows = {label: cells for label, *cells in rows_of(MIXERS, '| mixer | rate | images')}
    assert [*rows] == sorted(
        MODELS, key=lambda x: -mean_and_half(values(FOLDER, MODELS[x], TOP1))[0]
    )
    for label, (rate, *cells) in rows.items():
        found = runs(FOLDER, MODELS[label])
        (updates,) = {run['epoch_length'] for run in found}
        milli = milliseconds(FOLDER)[found[0]['config']]
        assert len(found) == 3 and abs(updates - 1e3 * SECONDS / milli) < 1
        assert {run['lr'] for run in found} == {chosen_rate(MODELS[label])} == {float(rate)}
        numbers = [[BATCH * updates], mean_and_half(values(FOLDER, MODELS[label], TOP1))]
        if MODELS[label] != FIRST:
            lead = claims[MODELS[label]]
            numbers += [[lead.mean, lead.half], [p[MODELS[label]]]]
        for cell, expected in zip(cells, numbers, strict=False):
            assert reprinted(cell, expected) == cell, (label, cell)


def test_sentences_on_pixels():
    claims, p = leads()
    ahead = {label for label, name in MODELS.items() if p.get(name, 1) < 0.05}
    assert ahead == {'linear attention', 'softmax attention'}
    assert all(claims[MODELS[label]].mean > 0 for label in ahead)
    soft, convolution = MODELS['softmax attention'], MODELS['depthwise convolution']
    control = Claim((FOLDER, TOP1), convolution, soft)
    times = [milliseconds(f'{FOLDER}{name}') for name in ('', '_xeon', '_one_head')]
    (conv,), (attention,) = ({run['config'] for run in runs(FOLDER, x)} for x in (FIRST, soft))
    zen, xeon = (part[conv] / part[attention] for part in times[:2])
    short = max(values(FOLDER, 'deit-*lr0.00[13]', TOP1))
    (one,) = runs(FOLDER, 'one-head_*')
    assert one['epoch_length'] == int(1e3 * SECONDS / times[2][attention])
    text = ' '.join(text_of(MIXERS).split())
    for sentence in (
        f'that of the convolution is {control.mean:.1f} ± {control.half:.1f}.',
        f'(AFT-conv {times[1][conv]:.0f} ms, softmax attention {times[1][attention]:,.0f}) it would '
        f'read {xeon / zen - 1:.0%} more next'.replace('%', ' %'),
        f'it gained {mean_and_half(values(FOLDER, soft, TOP1))[0] - short:.1f} points.',
        f'one head ({times[2][attention]:.0f} ms) and {BATCH * one["epoch_length"]:,} images it has '
        f'{one["metrics"][TOP1]:.1f} % (one seed)',
    ):
        assert sentence in text
    means = [mean_and_half(values(FOLDER, x, TOP1))[0] for x in (FIRST, soft, convolution)]
    sentence = (
        'ahead of softmax attention ({:.1f} against {:.1f} %), which reads a quarter of the images, '
        'and not of a depthwise convolution ({:.1f})'
    )
    assert sentence.format(*means) in ' '.join(text_of('docs/benchmarks.md').split())
