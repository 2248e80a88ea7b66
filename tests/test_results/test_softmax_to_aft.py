"""The numbers of docs/softmax_to_aft.md are those of its files."""

import csv
import json
import re
import statistics

import numpy as np
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


def probes():
    return [json.loads(line) for line in (FOLDER / 'probes.jsonl').read_text().splitlines()]


def difference(first, second):
    """Return the difference of runs by seed, as the page writes it, or '' if no seed has both."""
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return ''
    gain = 100 * np.mean([1.0 * first[seed] - second[seed] for seed in seeds], 0)
    half = 1.96 * gain.std(ddof=1) / len(gain) ** 0.5
    count = f' ({len(seeds)})' if len(seeds) > 1 else ''
    return f'{gain.mean():+.1f} ± {half:.1f}{count}'


def after_an_epoch(data, size):
    """Return the right answers by seed of the networks with a class token, by layers and mixer."""
    found = {}
    for row in probes():
        if (row.get('data'), row.get('size'), row.get('epochs')) == (data, size, 1):
            runs = found.setdefault((row['layers'], row['mixer']), {})
            runs[row['seed']] = softmax_to_aft.right_answers(row)
    return found


def test_the_table_of_probes():
    lines = softmax_to_aft.table(probes())
    shown = {line for line in text_of(PAGE).splitlines() if line.startswith(('| no |', '| yes |'))}
    assert len(shown) > 12
    assert shown <= set(lines)


def test_the_differences_between_mixers():
    right = {}
    for row in probes():
        if row.get('class_token') and (row['data'], row['size'], row['lr']) in (
            ('imagenette', 112, None),
            ('imagenette', 112, 1e-5),
        ):
            runs = right.setdefault((row['layers'], row['epochs'], row['mixer']), {})
            runs[row['seed']] = softmax_to_aft.right_answers(row)
    rows = rows_of(PAGE, '| layers | epochs')
    assert len(rows) >= 13
    names = 'attention', 'convolution', 'shuffled'
    losses, between = {}, {}
    for layers, epochs, *cells in rows:
        runs = [right.get((layers, int(epochs), name), {}) for name in names]
        base = right['', int(epochs), 'softmax']
        assert cells[:3] == [difference(run, base) for run in runs], (layers, epochs)
        assert cells[3:] == [difference(runs[0], run) for run in runs[1:]], (layers, epochs)
        for kept, found in ((losses, cells[:3]), (between, cells[3:])):
            values = [re.findall(r'[\d.]+', cell)[:2] for cell in found]
            signs = [-1 if cell.startswith('-') else 1 for cell in found]
            kept[layers, epochs] = [
                (sign * float(value[0]), float(value[1])) if value else None
                for sign, value in zip(signs, values, strict=True)
            ]
    text = ' '.join(text_of(PAGE).split())
    after = [(-x[0], key[0]) for key, cells in losses.items() if key[1] == '1' for x in cells if x]
    last = [loss for loss, layers in after if layers == '9-12']
    assert f'9–12 lose {min(last):.0f} to {max(last):.0f} points' in text
    reaches_0 = [abs(x[0]) <= x[1] for x in losses['9-12', '1']]
    assert reaches_0 == [True, True, False]
    others = min(loss for loss, layers in after if layers != '9-12')
    assert f'every other set at least {others:.1f}.' in text
    gain = 100 * np.mean([np.mean(x) for x in right['', 1, 'softmax'].values()])
    gain -= 100 * right['', 0, 'softmax'][0].mean()
    assert f'in which softmax attention gains {gain:.0f} points' in text
    # "the intervals of 2–4, 2–8 and 9–12 include 0".
    assert {key[0]: round(x[0][0]) for key, x in losses.items() if abs(x[0][0]) < x[0][1]} == {
        '9-12': 0,
        '2-4': -3,
        '2-8': -3,
    }
    assert all(abs(x[0][0]) <= x[0][1] for key, x in between.items() if key[1] == '1' and x[0])
    matters = {key[0] for key, x in between.items() if key[1] == '1' and x[1] and x[1][0] > x[1][1]}
    assert matters == {'1-4', '1-8', '1-12'}
    runs = [{0: right['1-8', 1, name][0]} for name in ('attention', 'zero')]
    behind = [round(float(x)) for x in difference(*runs).split(' ± ')]
    assert 'which is {} ± {} points behind in 1–8 (seed 0)'.format(*behind) in text
    small = after_an_epoch('cifar10', 112)
    lost = [difference(small['', 'softmax'], small[x, 'attention']) for x in ('9-12', '1-8')]
    last, most = (round(float(x.split()[0])) for x in lost)
    assert f'on CIFAR-10 {last} and {most}' in text
    for layers in ('9-12', '1-8'):
        pair = [small[layers, name] for name in ('attention', 'convolution')]
        gain, half = map(float, difference(*pair).removesuffix(' (3)').split(' ± '))
        assert abs(gain) < half
    large = after_an_epoch('imagenette', 224)
    pair = [large['9-12', name] for name in ('attention', 'convolution')]
    gain, half = map(float, difference(*pair).split(' ± '))
    assert abs(gain) < half
    lost = [difference(large['', 'softmax'], large[x, 'attention']) for x in ('9-12', '1-8')]
    assert all(cell.endswith(' (3)') for cell in lost)
    last, most = (float(x.split()[0]) for x in lost)
    assert f'at 224 px 9–12 lose {last:.0f} and 1–8 {most:.0f} points, on CIFAR-10' in text
    low, high = difference(right['1-8', 1, 'shuffled'], right['1-8', 1, 'zero']).split(' ± ')
    assert abs(float(low)) < float(high.partition(' ')[0])
    lost, half = difference(right['', 1, 'softmax'], right['1-8', 1, 'random']).split(' ± ')
    assert f'loses {float(lost):.0f} ± {half[0]} points' in text


def test_the_speed_of_converted_networks():
    found = {(r['mixer'], r['size'], r['layers']): r for r in probes() if 'speedup' in r}
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
