"""The numbers of docs/softmax_to_aft.md are those of its files."""

import csv
import json
import re
import statistics

import softmax_to_aft

from ..documents import text_of
from .shown import RESULTS, rows_of

PAGE = 'docs/softmax_to_aft.md'
FOLDER = RESULTS / 'softmax_to_aft'
INPUTS = 'photos', 'shuffled', 'noise', 'random'


def shares(name):
    """Return by layer, from 1, the shares of the mean and of single pictures of each head."""
    found = {}
    with (FOLDER / f'{name}.csv').open() as file:
        for row in csv.DictReader(file):
            pair = float(row['offset_share']), float(row['offset_share_of_images'])
            found.setdefault(int(row['layer'].split()[1]) + 1, []).append(pair)
    assert [len(heads) for heads in found.values()] == 12 * [6]
    return found


def test_the_shares_of_the_offset():
    by_input = {name: shares(name) for name in INPUTS}
    rows = rows_of(PAGE, '| layer | 256 photos')
    assert len(rows) > 6
    for layer, *cells in rows:
        for name, cell in zip(INPUTS, cells, strict=True):
            medians = map(statistics.median, zip(*by_input[name][int(layer)], strict=True))
            assert cell == ', '.join(f'{median:.2f}' for median in medians)

    def heads(name, layers):
        return sum(share >= 0.85 for layer in layers for share, _ in by_input[name][layer])

    counts = [
        heads(name, layers) for name in ('photos', 'random') for layers in (range(2, 7), (10, 11))
    ]
    text = ' '.join(text_of(PAGE).split())
    sentence = r'in (\d+) of the 30 heads of layers 2–6, and in (\d+) of the 12 .* for (\d+) and (\d+) of these'
    assert list(map(int, re.search(sentence, text).groups())) == counts
    most = [
        max(x for heads in by_input[n].values() for _, x in heads) for n in ('random', 'photos')
    ]
    assert f'at most {most[0]:.2f}, against up to {most[1]:.2f}' in text
    # What the variance of a sample of 40 would have added.
    of_40 = {
        layer: [1 / (1 / mean + (1 / single - 1 / mean) / 40) for mean, single in heads]
        for layer, heads in by_input['photos'].items()
    }
    counts = [
        sum(x >= 0.85 for i in layers for x in of_40[i]) for layers in (range(2, 7), (10, 11))
    ]
    assert f'40 pictures would give {counts[0]} of 30 and {counts[1]} of 12' in text


def test_the_table_of_probes():
    rows = [json.loads(line) for line in (FOLDER / 'probes.jsonl').read_text().splitlines()]
    lines = softmax_to_aft.table(rows)
    shown = {line for line in text_of(PAGE).splitlines() if line.startswith(('| no |', '| yes |'))}
    assert len(shown) > 20
    assert shown <= set(lines)
    after = {
        row['mixer']: softmax_to_aft.right_answers(row)
        for row in rows
        if 'right' in row and (row['layers'], row['seed'], row['lr']) == ('1-8', 0, 1e-5)
    }
    gain = 100.0 * after['attention'] - 100.0 * after['zero']
    half = 1.96 * gain.std(ddof=1) / len(gain) ** 0.5
    assert f'worth {gain.mean():.0f} ± {half:.0f} points over w = 0' in text_of(PAGE)


def test_the_speed_of_converted_networks():
    rows = [json.loads(line) for line in (FOLDER / 'probes.jsonl').read_text().splitlines()]
    found = {(r['mixer'], r['size'], r['layers']): r for r in rows if 'speedup' in r}
    shown = rows_of(PAGE, '| px | images/s')
    assert [row[0] for row in shown] == ['112', '224', '512', '1,024']
    for pixels, rate, *cells in shown:
        size = int(pixels.replace(',', ''))
        assert rate == f'{found["softmax", size, ""]["images_per_cpu_second"]:.3g}'
        for cell, layers in zip(cells, ('1-4', '1-8', '1-12'), strict=True):
            row = found['attention', size, layers]
            assert cell == f'{row["speedup"]:.2f} ({row["least"]:.2f}–{row["most"]:.2f})'
    slow = [row['speedup'] for key, row in found.items() if key[:2] == ('convolution', 224)]
    assert (round(1 / max(slow)), round(1 / min(slow))) == (3, 7)
    assert '3 to 7 times as slow at 224 px' in ' '.join(text_of(PAGE).split())
