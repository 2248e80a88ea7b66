"""The tables and sentences on ListOps of 33 to 512 tokens are those of the runs."""

import statistics
from collections import Counter

import pytest
import torch
from mmengine.config import Config

from aft_mm.datasets import ListOps
from aft_mm.registry import MODELS as BUILDERS

from ..documents import ROOT, text_of
from .shown import (
    BITS,
    MIXERS,
    RESULTS,
    Claim,
    holm,
    mean_and_half,
    milliseconds,
    reprinted,
    rows_of,
    runs,
    values,
)

FOLDER, ACCURACY = 'synthetic_tasks/listops_128', 'percent_correct_tokens'
SECONDS = 55
MODELS = {
    'AFT-simple': 'aft-simple-*_seed?',
    'AFT-conv': 'aft-conv-*_seed?',
    'softmax attention, 4 heads': 'transformer-mini-h4_*_seed?',
    'softmax attention, 1 head': 'transformer-mini_*_seed?',
    'linear attention': 'linear-*_seed?',
    'LSTM': 'lstm-*_seed?',
    'depthwise convolution': 'depthwise-*_seed?',
    'token shift': 'token-shift-*_seed?',
}
FIRST, *OTHERS = MODELS.values()
# Of 256 to 512 tokens.
LONGER, LONGER_SECONDS = 'synthetic_tasks/listops_512', 420
# Their updates take the time of AFT-simple's on a Xeon.
LATER = 'softmax attention, 1 head', 'LSTM', 'token shift'


def corrected(seeds='?', folder=FOLDER):
    """Return the p values of AFT-simple against the others, after Holm."""
    first, *rest = (name.replace('?', seeds) for name in MODELS.values())
    p = (Claim((folder, ACCURACY), first, other).p for other in rest)
    return holm(dict(zip(OTHERS, p, strict=True)))


def chosen_rate(pattern):
    """Return the rate with the fewer bits in the validation of seed 0."""
    first = runs(FOLDER, pattern)[0]
    bits = {first['lr']: first['val'][BITS][-1]}
    for run in runs(FOLDER, pattern.replace('seed?', 'lr0.00[13]')):
        bits[run['lr']] = run['metrics'][BITS]
    assert bits.keys() == {1e-3, 3e-3}
    return min(bits, key=bits.get)


def check_row(cells, folder, label, seconds, p, more=()):
    """Compare updates, bits, accuracy, further numbers, the lead of AFT-simple and its p."""
    found = runs(folder, MODELS[label])
    config = found[0]['config']
    if folder == LONGER and label in LATER:
        times, first = milliseconds(f'{folder}_xeon'), runs(folder, FIRST)[0]
        updates = int(first['epoch_length'] * times[first['config']] / times[config])
    else:
        updates = int(1e3 * seconds / milliseconds(folder)[config])
    assert [run['epoch_length'] for run in found] == 5 * [updates]
    numbers = [
        [updates],
        mean_and_half(values(folder, MODELS[label], BITS)),
        mean_and_half(values(folder, MODELS[label], ACCURACY)),
        *more,
    ]
    if MODELS[label] != FIRST:
        lead = Claim((folder, ACCURACY), FIRST, MODELS[label])
        numbers += [[lead.mean, lead.half], [p[MODELS[label]]]]
    for cell, expected in zip(cells, numbers, strict=False):
        assert reprinted(cell, expected) == cell, (label, cell)


def test_the_table_of_longer_lists():
    p = corrected(folder=LONGER)
    rows = {label: cells for label, *cells in rows_of(MIXERS, '| mixer | updates')}
    assert [*rows] == sorted(
        MODELS, key=lambda x: -mean_and_half(values(LONGER, MODELS[x], ACCURACY))[0]
    )
    for label, cells in rows.items():
        rates = {run['lr'] for run in runs(LONGER, MODELS[label])}
        assert rates == {runs(FOLDER, MODELS[label])[0]['lr']}
        check_row(cells, LONGER, label, LONGER_SECONDS, p)


def test_the_table_of_long_lists():
    p = corrected()
    rows = {label: cells for label, *cells in rows_of(MIXERS, '| mixer | rate')}
    assert rows.keys() == MODELS.keys()
    for label, (rate, *cells) in rows.items():
        found = runs(FOLDER, MODELS[label])
        assert {run['lr'] for run in found} == {chosen_rate(MODELS[label])} == {float(rate)}
        parts = (
            [statistics.mean(run['tests'][part][ACCURACY] for run in found)]
            for part in ('32 to 64 tokens', '64 to 128 tokens')
        )
        check_row(cells, FOLDER, label, SECONDS, p, parts)


@pytest.mark.parametrize(
    'options',
    [
        dict(max_length=128, min_length=33),
        dict(max_length=512, min_length=256, max_depth=8, max_args=5),
    ],
)
def test_what_the_first_operation_tells(options):
    data = ListOps('test', num_samples=2048, **options)
    samples = (data[index]['inputs'] for index in range(len(data)))
    pairs = Counter((int(tokens[0]), int(tokens[-1])) for tokens in samples)
    best = [max(n for (first, _), n in pairs.items() if first == 10 + i) for i in range(4)]
    sentence = f'first operation gives {sum(best) / len(data):.1%}'.replace('%', ' %')
    assert sentence in ' '.join(text_of(MIXERS).split())


def test_sentences_on_long_lists():
    text = ' '.join(text_of(MIXERS).replace('*', '').split())
    four = MODELS['softmax attention, 4 heads']
    p = Claim((FOLDER, ACCURACY), FIRST, four).p
    assert f'softmax attention with four heads (not corrected: p = {p:.3f}), where' in text
    ahead = {other for other, p in corrected().items() if p < 0.05}
    assert ahead == {*OTHERS} - {MODELS['AFT-conv'], four}
    assert {x for x, p in corrected('[012]').items() if p < 0.05} == {MODELS['LSTM']}
    best = values(FOLDER, FIRST, ACCURACY)
    assert f'with each seed ({min(best):.1f} to {max(best):.1f} %)' in text
    above = {
        name: [x for x in values(FOLDER, name, ACCURACY) if x > 25]
        for name in OTHERS
        if name != MODELS['AFT-conv']
    }
    assert {name for name, found in above.items() if found} == {four} and len(above[four]) == 3
    assert f'exceeds 25 %, with three seeds (at most {max(above[four]):.1f} %)' in text
    means = [mean_and_half(values(FOLDER, name, ACCURACY))[0] for name in (FIRST, four)]
    shown = 'lead over softmax attention with four heads ({:.1f} against {:.1f} %)'.format(*means)
    assert shown in ' '.join(text_of('docs/benchmarks.md').split())


def test_how_many_tokens_two_layers_see():
    text = ' '.join(text_of(MIXERS).split())
    assert 'convolution see 31 tokens, of the token shift three,' in text
    for name, seen in (('depthwise-conv-mini-k31', 31), ('token-shift-mini', 3)):
        config = Config.fromfile(ROOT / f'configs/synthetic_tasks/{name}_1xb32-1e_listops-t128.py')
        decoder = BUILDERS.build(config.model.decoder).eval()
        x = torch.randn(1, 100, decoder.embed_dims, requires_grad=True)
        y = x
        for layer in decoder.layers:
            y = layer(y)
        y[0, 70].sum().backward()
        assert x.grad[0].abs().sum(-1).nonzero().flatten().tolist() == list(range(71 - seen, 71))


def test_the_figure_shows_the_means_of_the_tables(tmp_path, monkeypatch):
    import plot_lengths

    folders = {32: 'synthetic_tasks/listops', 128: FOLDER, 512: LONGER}
    words = [f'{length}={RESULTS}/{folder}/runs.jsonl' for length, folder in folders.items()]
    words += '--metric', ACCURACY, '--out', str(tmp_path / 'lengths.png')
    figure = plot_lengths.new_figure(6, 3)
    monkeypatch.setattr(plot_lengths, 'new_figure', lambda *size: figure)
    monkeypatch.setattr('sys.argv', ['plot_lengths.py', *words])
    plot_lengths.main()
    assert (tmp_path / 'lengths.png').stat().st_size
    shown = {bars.get_label(): bars[0].get_xydata().tolist() for bars in figure.axes[0].containers}
    assert shown.keys() == MODELS.keys()
    tables = (
        (32, rows_of(MIXERS, '| mixer | bits per answer | accuracy, % |', 1), 2),
        (128, rows_of(MIXERS, '| mixer | rate'), 4),
        (512, rows_of(MIXERS, '| mixer | updates'), 3),
    )
    printed = {(x, row[0]): row[cell].split()[0] for x, rows, cell in tables for row in rows}
    printed[32, 'softmax attention, 1 head'] = printed.pop((32, 'softmax attention'))
    for label, points in shown.items():
        assert [length for length, _ in points] == [x for x, *_ in tables if (x, label) in printed]
        for length, accuracy in points:
            assert f'{accuracy:.1f}' == printed[length, label], (label, length)
