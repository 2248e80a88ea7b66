"""Tables and intervals of the documents are those that docs/results gives."""

import itertools
import json
import math
import re
import statistics
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import NamedTuple

import config_tables
import pytest

from aft_mm.analysis.plot_curves import draw_curves
from aft_mm.analysis.run_files import read_lines, records_of, selected
from aft_mm.analysis.run_logs import read_times, trained, validations
from aft_mm.analysis.verdicts import difference, mean_interval

from .documents import text_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / 'docs/results'
FILES = sorted(RESULTS.rglob('runs.jsonl'))
NUMBER = re.compile(r'(?<![\w.])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\w)')
BITS, TOP1, WORDS = 'bits_per_token', 'accuracy/top1', 'word_error_rate'


def runs(folder, pattern):
    """Return the runs of a folder of docs/results, by seed."""
    found = selected(f'{RESULTS}/{folder}/runs.jsonl:{pattern}').values()
    return sorted(found, key=lambda run: run.get('seed', 0))


def values(folder, pattern, metric):
    return [run['metrics'][metric] for run in runs(folder, pattern)]


def mean_and_half(numbers):
    interval = mean_interval(numbers)
    half = () if interval is None else ((interval[1] - interval[0]) / 2,)
    return [statistics.mean(numbers), *half]


def reprinted(text, numbers):
    """Return the text with its numbers replaced, in their format."""
    rest = iter(numbers)

    def replace(found):
        old = found.group()
        if 'e' in old:
            return f'{next(rest):.0e}'.replace('e-0', 'e-')
        sign = '+' if old.startswith('+') else ''
        comma = ',' if ',' in old else ''
        places = Decimal(1).scaleb(-len(old.partition('.')[2]))
        number = Decimal(repr(float(next(rest)))).quantize(places, ROUND_HALF_UP)
        new = f'{number:{sign}{comma}}'
        return new if set(new) - set('+-0.') else new.lstrip('-')

    text = NUMBER.sub(replace, text)
    assert not list(rest), f'{text} shows fewer numbers than {list(numbers)}'
    return text


# Columns: functions of the folder and the pattern of a row.


def mean(metric, factor=1.0):
    return lambda folder, pattern: mean_and_half(
        [factor * value for value in values(folder, pattern, metric)]
    )


def only_mean(*path):
    return lambda folder, pattern: [
        statistics.mean(entry(run, path) for run in runs(folder, pattern))
    ]


def each(*path):
    return lambda folder, pattern: [entry(run, path) for run in runs(folder, pattern)]


def entry(run, path):
    for key in path:
        run = run[key]
    return run


def minus(other, metric, folder_of_other=None):
    def numbers(folder, pattern):
        reference = values(folder_of_other or folder, other, metric)
        found = difference(values(folder, pattern, metric), reference)
        return [found.mean, (found.interval[1] - found.interval[0]) / 2]

    return numbers


def milliseconds(folder, pattern):
    times = read_times(RESULTS / folder.replace('enwik8_peak', 'enwik8_grid') / 'iterations.json')
    return [times[runs(folder, pattern)[0]['config']]]


def rate(folder, pattern):
    return [runs(folder, pattern)[0]['lr']]


def last(metric):
    return lambda folder, pattern: [runs(folder, pattern)[0]['val'][metric][-1]]


class Table(NamedTuple):
    page: str
    header: str
    folder: str
    rows: dict[str, str]
    columns: dict


def seeds(**names):
    return {label.replace('_', ' '): pattern for label, pattern in names.items()}


REPRODUCTION, MIXERS = 'docs/reproduction.md', 'docs/mixer_comparison.md'
SPEECH = 'configs/speech_recognition/README.md'
CONTROLS = {
    'depthwise convolution (control)': 'depthwise*',
    'token shift (control)': 'token-shift*',
    'average pooling (control)': 'pooling*',
    'no mixing (control)': 'identity*',
    'AFT-conv': 'aft-conv*',
    'AFT-full': 'aft-full*',
    'softmax attention (DeiT)': 'deit*',
}
WITHOUT_KEYS = {
    'depthwise convolution': 'depthwise-*',
    'average pooling': 'pooling-*',
    'token shift': 'token-shift-*',
    'no mixing': 'identity-*',
}
ON_TOKENS = WITHOUT_KEYS | {
    'softmax attention': 'transformer-*',
    'linear attention': 'linear-*',
    'LSH attention (Reformer)': 'reformer-*',
    'strided attention': 'sparse-*',
    'AFT-full': 'aft-full-*',
    'AFT-local-4': 'aft-local-4-*',
    'AFT-simple': 'aft-simple-*',
    'AFT-conv': 'aft-conv-*2e_*',
    'AFT-conv, `init_peak=6`': 'aft-conv-*peak_*',
    'LSTM': 'lstm-*',
    'Performer': 'performer-*',
    'dense Synthesizer': 'synthesizer-*',
}
ON_ENWIK8 = {
    'LSTM': 'lstm-*',
    'AFT-conv, `init_peak=6`': '../enwik8_peak:aft-conv-*',
    'depthwise convolution, kernel 31': 'depthwise-*',
    'token shift': 'token-shift-*',
    'AFT-conv': 'aft-conv-*',
    'average pooling, kernel 31': 'pooling-*',
    'AFT-local-hard-32': 'aft-local-hard-*',
    'strided attention': 'sparse-*',
    'AFT-local-32': 'aft-local-32-*',
    'local softmax attention': 'image-transformer-*',
    'AFT-full': 'aft-full-*',
    'AFT-simple': 'aft-simple-*',
    'Performer': 'performer-*',
    'softmax attention': 'transformer-*',
    'dense Synthesizer': 'synthesizer-*',
    'linear attention': 'linear-*',
    'LSH-4': 'reformer-*',
    'AFT-local-learned-32': 'aft-local-learned-*',
    'no mixing': 'identity-*',
}
ON_MNIST = {
    'AFT-conv, kernel 13 × 13, `init_peak=3`': 'aft-conv-*',
    'depthwise convolution, kernel 13 × 13': 'depthwise-*',
    'AFT-simple': 'aft-simple-*',
    'AFT-local-32': 'aft-local-*',
    'softmax attention, 4 heads': 'transformer-*',
    'linear attention, 4 heads': 'linear-*',
}
COPIES = {
    **{
        name: ON_TOKENS[name]
        for name in ('softmax attention', 'linear attention', 'AFT-simple', 'AFT-full')
    },
    'LSH-4': 'lsh-4-*',
    'AFT-local-8': 'aft-local-8-*',
    'AFT-conv, kernel 31': 'aft-conv-*',
    'depthwise convolution, kernel 31': 'depthwise-*',
    'average pooling, kernel 31': 'pooling-*',
    'token shift': 'token-shift-*',
    'no mixing': 'identity-*',
}


def each_seed(rows):
    """Return the pattern of the seeds of each row, without short runs."""
    return {label: f'{pattern}_seed?' for label, pattern in rows.items()}


def images(folder, pattern):
    (found,) = {
        re.search(r'train_dataloader.dataset.indices=(\d+)', run['options'])[1]
        for run in runs(folder, pattern)
    }
    return [int(found)]


TABLES = [
    Table(
        REPRODUCTION,
        '| mixer | accuracy of 300 images',
        'imagenette',
        CONTROLS,
        {1: mean(TOP1), 2: minus('aft-conv*', TOP1)},
    ),
    Table(
        REPRODUCTION,
        '| mixer | accuracy, %, mean of three seeds | minus AFT-conv | published',
        'cifar10_full',
        CONTROLS,
        {1: mean(TOP1), 2: minus('aft-conv*', TOP1)},
    ),
    Table(
        REPRODUCTION,
        '| mixer | accuracy, %, mean of three seeds | of seeds',
        'cifar10_full_28_epochs',
        {label: CONTROLS[label] for label in (*list(CONTROLS)[:1], 'AFT-conv', [*CONTROLS][-1])},
        {1: mean(TOP1), 2: each('metrics', TOP1), 3: minus('aft-conv*', TOP1)},
    ),
    Table(
        REPRODUCTION,
        '| mixer | parameters, M | ms per iteration',
        'mnist_six_minutes',
        each_seed(ON_MNIST),
        {2: milliseconds, 3: images, 4: rate, 5: mean('bits_per_dim')},
    ),
    Table(
        REPRODUCTION,
        '| config | mixer | test |',
        'mnist',
        {
            f'`{name}`': name
            for name in (
                'aft-local2d-hard-mini_1xb16-2e_mnist',
                'aft-local-32-mini_1xb16-2e_mnist',
                'aft-local-learned-32-mini_1xb16-2e_mnist',
            )
        },
        {2: each('metrics', 'bits_per_dim')},
    ),
    Table(
        REPRODUCTION,
        '| self-attention of the decoder',
        'multi30k',
        {
            'AFT-simple': 'aft-simple*',
            'softmax, 4 heads': 'transformer*',
            'AFT-local-16': 'aft-local*',
        },
        {
            1: mean('perplexity_per_subword'),
            2: mean('bleu'),
            3: each('tests', 'sacrebleu', 'BLEU'),
            4: only_mean('tests', 'sacrebleu', 'chrF2'),
            5: only_mean('metrics', 'bleu_length_ratio'),
        },
    ),
    Table(
        REPRODUCTION,
        '| mixer | nats per token',
        'copy_task',
        COPIES,
        {
            1: mean(BITS, math.log(2)),
            2: mean('percent_correct_tokens'),
            3: mean('percent_correct_sequences'),
        },
    ),
    Table(
        REPRODUCTION,
        '| mixer | bits/char | against softmax attention',
        'enwik8_grid',
        each_seed(ON_ENWIK8),
        {
            1: mean('bits_per_char'),
            2: minus('transformer-*_seed?', 'bits_per_char', 'enwik8_grid'),
            3: milliseconds,
        },
    ),
    Table(
        REPRODUCTION,
        '| mixer | test | validation |',
        'enwik8',
        {
            'LSTM': 'lstm*',
            'AFT-conv, `init_peak=6`': 'aft-conv*',
            'depthwise convolution, kernel 31': 'depthwise*',
        },
        {1: each('metrics', 'bits_per_char'), 2: last('bits_per_char')},
    ),
    Table(
        REPRODUCTION,
        '| backbone | parameters, M | seed',
        'bccd_48_epochs',
        {
            'AFT-conv, convolutional stem': 'retinanet-aft-conv*',
            'average pooling, convolutional stem': '*_bccd_conv-stem_*',
            'average pooling': 'retinanet-pooling-mini_1xb4-24e_bccd_seed*',
            'ResNet-18 with a feature pyramid': 'retinanet-resnet18*',
        },
        {
            2: each('seed'),
            3: each('metrics', 'coco/bbox_mAP'),
            4: each('metrics', 'coco/bbox_mAP_50'),
            5: each('metrics', 'coco/bbox_mAP_75'),
        },
    ),
    Table(
        REPRODUCTION,
        '| | mIoU, % | accuracy of the pixels',
        'camvid',
        {
            '`upernet-aft-conv-mini_1xb4-2400i-conv-stem_camvid`, `--amp`': 'upernet-aft*2400i*',
            'average pooling, `upernet-pooling-mini_1xb4-2400i-conv-stem_camvid`, `--amp`': '*pool*',
            'ResNet-18, 13.2 million parameters, `upernet-resnet18_1xb4-2400i_camvid`, `--amp`': (
                '*resnet*'
            ),
            '`upernet-aft-conv-mini_1xb4-1200i_camvid`': 'upernet-aft-conv-mini_1xb4-1200i*',
            '`fcn-aft-conv-mini_1xb4-1200i_camvid`': 'fcn*',
        },
        {1: each('metrics', 'mIoU'), 2: each('metrics', 'aAcc')},
    ),
    *(
        Table(
            MIXERS,
            '| mixer | bits per answer',
            f'synthetic_tasks/{task}',
            each_seed(ON_TOKENS),
            {1: mean(BITS), 2: mean('percent_correct_tokens')},
        )
        for task in ('mqar', 'listops')
    ),
    Table(
        MIXERS,
        '| mixer | rate | accuracy',
        'synthetic_tasks/pathfinder',
        each_seed(
            {
                label: row
                for label, row in ON_TOKENS.items()
                if label not in ('AFT-conv, `init_peak=6`', 'LSTM', 'token shift')
            }
            | {
                'softmax attention': 'deit-*',
                'AFT-conv': 'aft-conv-*',
                'AFT-local-4': 'aft-local2d-4-*',
            }
        ),
        {1: rate, 2: mean(TOP1)},
    ),
    Table(
        SPEECH,
        '| model | characters | words | mean',
        'an4',
        {
            'AFT-conv': 'aft-conv*',
            'softmax attention': 'transformer*',
            'Bi-LSTM': 'bi-lstm*',
            'AFT-simple': 'aft-simple*',
        },
        {
            1: each('metrics', 'character_error_rate'),
            2: each('metrics', WORDS),
            3: mean(WORDS),
            4: each('metrics', 'lexicon/character_error_rate'),
            5: each('metrics', f'lexicon/{WORDS}'),
            6: mean(f'lexicon/{WORDS}'),
        },
    ),
    Table(
        SPEECH,
        '| model | free spelling',
        'fsdd',
        {
            'softmax attention': 'transformer*',
            'Conformer': 'conformer*',
            'AFT-simple': 'aft-simple*',
            'AFT-conv': 'aft-conv*',
            'TDNN': 'tdnn*',
            'Bi-LSTM': 'bi-lstm*',
        },
        {1: each('metrics', WORDS), 2: mean(WORDS), 3: each('metrics', f'lexicon/{WORDS}')},
    ),
]


def rows_of(page, header, index=0):
    """Return the rows of a table of a page, as lists of cells without emphasis."""
    lines = text_of(page).splitlines()
    begin = [number for number, line in enumerate(lines) if line.startswith(header)][index]
    found = itertools.takewhile(lambda line: line.startswith('|'), lines[begin + 2 :])
    plain = (re.sub(r'\*|\[([^\]]+)\]\([^)]+\)', r'\1', line) for line in found)
    return [[cell.strip().replace('−', '-') for cell in line[1:-1].split(' |')] for line in plain]


def located(table, label):
    """Return the folder and the pattern of a row; a pattern may begin with another folder."""
    folder, _, pattern = table.rows[label].rpartition(':')
    return folder.removeprefix('../') or table.folder, pattern


@pytest.mark.parametrize('table', TABLES, ids=lambda table: table.folder.replace('/', '_'))
def test_tables_are_those_of_the_runs(table):
    same = [other for other in TABLES if other[:2] == table[:2]]
    rows = rows_of(table.page, table.header, same.index(table))
    several = any(cells[0].startswith('the same') or not cells[0] for cells in rows)
    shown, label = [], ''
    for cells in rows:
        if cells[0] and not cells[0].startswith('the same'):  # otherwise another seed
            label = cells[0]
        if label not in table.rows:
            continue
        shown.append(label)
        folder, pattern = located(table, label)
        seed = shown.count(label) - 1
        for column, numbers in table.columns.items():
            if cells[column] == '–':
                continue
            found = numbers(folder, pattern)
            found = found[seed : seed + 1] if several else found
            assert reprinted(cells[column], found) == cells[column], (label, column)
    assert {*shown} == {*table.rows}


class Claim:
    """Mean of a group, or of its difference from another group, for the sentences below."""

    def __init__(self, place, group, other=None, factor=1.0):
        folder, metric = place
        numbers = [factor * x for x in values(*split(folder, group), metric)]
        if other is None:
            self.mean, self.half = mean_and_half(numbers)
        else:
            found = difference(numbers, [factor * x for x in values(*split(folder, other), metric)])
            self.mean, self.p = found.mean, found.p
            self.half = (found.interval[1] - found.interval[0]) / 2
        self.size = abs(self.mean)


def split(folder, pattern):
    other, _, name = pattern.rpartition(':')
    return other or folder, name


IMAGENETTE, CIFAR10 = ('imagenette', TOP1), ('cifar10_full', TOP1)
LONGER = 'cifar10_full_28_epochs', TOP1
MNIST, TEXT = ('mnist_six_minutes', 'bits_per_dim'), ('enwik8_grid', 'bits_per_char')
CLAIMS, CLAIMS_IMAGES = ('claims', 'bits_per_char'), ('claims', TOP1)
COPY = 'copy_task', BITS
RECALL, LISTOPS = (('synthetic_tasks/mqar', BITS), ('synthetic_tasks/listops', BITS))
LISTOPS_HITS = 'synthetic_tasks/listops', 'percent_correct_tokens'
PATHS = 'synthetic_tasks/pathfinder', TOP1
CELLS, STREETS = 'bccd_48_epochs', ('camvid', 'mIoU')
AN4, AN4_WORDS = ('an4', WORDS), ('an4', f'lexicon/{WORDS}')
CONV, SOFTMAX = 'aft-conv-*_seed?', 'transformer-*_seed?'
PEAK = 'enwik8_peak:aft-conv-*'
SENTENCES = [
    (
        REPRODUCTION,
        'average pooling (p = {0.p:.3f}), no mixing (p = {1.p:.3f}) and DeiT (p = {2.p:.2f})',
        [(IMAGENETTE, 'aft-conv*', other) for other in ('pooling*', 'identity*', 'deit*')],
    ),
    (
        REPRODUCTION,
        'AFT-conv is {0.mean:.1f} points ahead of DeiT (p = {0.p:.3f}) and {1.size:.1f} behind a '
        'plain depthwise convolution of the same kernel and size (p = {1.p:.3f}). AFT-full is '
        '{2.mean:.1f} ± {2.half:.1f} points ahead of DeiT (p = {2.p:.3f}); its difference from '
        'AFT-conv is inconclusive (p = {3.p:.2f}). Average pooling and no mixing are {4.size:.1f} '
        'and {5.size:.1f} points behind AFT-conv',
        [
            (CIFAR10, 'aft-conv*', 'deit*'),
            (CIFAR10, 'aft-conv*', 'depthwise*'),
            (CIFAR10, 'aft-full*', 'deit*'),
            (CIFAR10, 'aft-full*', 'aft-conv*'),
            (CIFAR10, 'pooling*', 'aft-conv*'),
            (CIFAR10, 'identity*', 'aft-conv*'),
        ],
    ),
    (
        REPRODUCTION,
        'is {0.mean:.1f} ± {0.half:.1f} points ahead of DeiT (p = {0.p:.2f}); its difference from '
        'AFT-conv is inconclusive (p = {1.p:.1f}), and it is {2.size:.1f} points behind the '
        'depthwise convolution (p = {2.p:.2f})',
        [(CIFAR10, 'token-shift*', other) for other in ('deit*', 'aft-conv*', 'depthwise*')],
    ),
    (
        REPRODUCTION,
        'AFT-conv is {0.mean:.1f} points ahead of DeiT (p = {0.p:.2f}) and {1.size:.1f} behind the '
        'depthwise convolution (p = {1.p:.2f})',
        [(LONGER, 'aft-conv*', 'deit*'), (LONGER, 'aft-conv*', 'depthwise*')],
    ),
    (
        REPRODUCTION,
        'it reaches {0.mean:.4f} ± {0.half:.4f} bits/dim on 7,500',
        [(('mnist', 'bits_per_dim'), 'aft-conv*')],
    ),
    (
        REPRODUCTION,
        '{0.size:.3f} ± {0.half:.3f} ahead of AFT-simple and {1.size:.3f} ± {1.half:.3f} ahead of '
        'softmax attention',
        [(MNIST, CONV, 'aft-simple-*_seed?'), (MNIST, CONV, SOFTMAX)],
    ),
    (
        REPRODUCTION,
        'The difference between AFT-conv and the depthwise convolution is inconclusive '
        '(p = {0.p:.2f}): the convolution needs',
        [(MNIST, CONV, 'depthwise-*_seed?')],
    ),
    (
        REPRODUCTION,
        'AFT-local is {0.size:.3f} ± {0.half:.3f} bits/char ahead of the learned weights',
        [(CLAIMS, 'enwik8-window-32_*', 'enwik8-learned-32_*')],
    ),
    (
        REPRODUCTION,
        'sigmoid-softmax ({0.mean:.4f} bits/char): relu-softmax {1.mean:.3f} ± {1.half:.3f} '
        '(inconclusive), relu {2.mean:+.3f} ± {2.half:.3f} and relu2 {3.mean:+.3f} ± {3.half:.3f} '
        '(same sign here); of relu2 from relu: {4.mean:.3f} ± {4.half:.3f}',
        [
            (CLAIMS, 'enwik8-window-0_*'),
            *((CLAIMS, f'enwik8-{key}_*', 'enwik8-window-0_*') for key in ('relu-softmax', 'relu')),
            (CLAIMS, 'enwik8-relu2_*', 'enwik8-window-0_*'),
            (CLAIMS, 'enwik8-relu2_*', 'enwik8-relu_*'),
        ],
    ),
    (
        REPRODUCTION,
        'AFT-conv has {0.mean:.1f} ± {0.half:.1f} % top-1. Differences from it: {1.mean:.1f} ± '
        '{1.half:.1f} without the query, {2.mean:.1f} ± {2.half:.1f} not reparameterised, '
        '{3.mean:+.1f} ± {3.half:.1f} without global connectivity, {4.mean:+.1f} ± {4.half:.1f} '
        'with the entropy penalty',
        [
            (CLAIMS_IMAGES, 'imagenette-conv_*'),
            *(
                (CLAIMS_IMAGES, f'imagenette-{change}_*', 'imagenette-conv_*')
                for change in ('no-query', 'naive', 'no-global', 'entropy')
            ),
        ],
    ),
    (
        REPRODUCTION,
        'ahead of softmax attention by {0.size:.3f} ± {0.half:.3f} bits per subword '
        "(p = {0.p:.3f}, Welch's t). The difference between AFT-simple and softmax attention, "
        '{1.mean:.3f} ± {1.half:.3f}, is inconclusive. - BLEU: all differences are inconclusive. '
        'AFT-local-16 minus softmax attention is {2.mean:.1f} ± {2.half:.1f}, AFT-simple minus '
        'softmax attention {3.mean:.1f} ± {3.half:.1f}',
        [
            (('multi30k', 'bits_per_subword'), 'aft-local*', 'transformer*'),
            (('multi30k', 'bits_per_subword'), 'aft-simple*', 'transformer*'),
            (('multi30k', 'bleu'), 'aft-local*', 'transformer*'),
            (('multi30k', 'bleu'), 'aft-simple*', 'transformer*'),
        ],
    ),
    (
        REPRODUCTION,
        'does not differ significantly from AFT-conv ({0.size:.2f} ± {0.half:.2f} nats)',
        [(COPY, 'depthwise-*', 'aft-conv-*', math.log(2))],
    ),
    (
        REPRODUCTION,
        'here it stays {0.mean:.2f} ± {0.half:.2f} nats behind (p = {0.p:.2f}, opposite',
        [(COPY, 'linear-*', 'transformer-*', math.log(2))],
    ),
    (
        REPRODUCTION,
        'is {0.size:.3f} ± {0.half:.3f} bits ahead of AFT-conv, a token shift {1.size:.3f} ± '
        '{1.half:.3f}. After so few',
        [(TEXT, 'depthwise-*_seed?', CONV), (TEXT, 'token-shift-*_seed?', CONV)],
    ),
    (
        REPRODUCTION,
        '{0.size:.3f} ± {0.half:.3f} bits ahead of AFT-conv with the initial bias below, '
        '{1.size:.3f} ± {1.half:.3f} ahead of the depthwise convolution',
        [(TEXT, 'lstm-*_seed?', PEAK), (TEXT, 'lstm-*_seed?', 'depthwise-*_seed?')],
    ),
    (
        REPRODUCTION,
        'AFT-conv is then {0.size:.3f} ± {0.half:.3f} bits ahead of the depthwise convolution',
        [(TEXT, PEAK, 'depthwise-*_seed?')],
    ),
    (
        REPRODUCTION,
        'on enwik8 {0.size:.3f} ± {0.half:.3f} bits better (p < 0.001)',
        [(TEXT, PEAK, CONV)],
    ),
    (
        REPRODUCTION,
        '{0.size:.3f} ± {0.half:.3f} bits worse (p < 0.001), on',
        [(LISTOPS, 'aft-conv-*peak_*', 'aft-conv-*2e_*')],
    ),
    (
        REPRODUCTION,
        '({0.size:.3f} ± {0.half:.3f} bits worse) and on',
        [(RECALL, 'aft-conv-*peak_*_seed?', 'aft-conv-*2e_*_seed?')],
    ),
    (
        REPRODUCTION,
        'with `init_peak=3` ({0.size:.1f} ± {0.half:.1f} points better)',
        [(('fsdd', WORDS), 'fsdd/init_peak:aft-conv*', 'aft-conv*')],
    ),
    (
        REPRODUCTION,
        'puts AFT-conv {0.size:.3f} ± {0.half:.3f} bits ahead of AFT-local-hard-32; without it, '
        'AFT-conv is {1.size:.3f} ± {1.half:.3f} bits behind: it reaches {2.mean:.3f} ± '
        '{2.half:.3f} bits/char',
        [
            (TEXT, CONV, 'aft-local-hard-*_seed?'),
            (TEXT, 'enwik8_naive_kernel:*', 'aft-local-hard-*_seed?'),
            (TEXT, 'enwik8_naive_kernel:*'),
        ],
    ),
    (
        REPRODUCTION,
        'AFT-conv has {0.mean:.3f} ± {0.half:.3f} AP and {1.mean:.3f} ± {1.half:.3f} AP at IoU 0.5, '
        'average pooling with the same stem {2.mean:.3f} ± {2.half:.3f} and {3.mean:.3f} ± '
        '{3.half:.3f}, ResNet-18 with 9.5 times the parameters {4.mean:.3f} ± {4.half:.3f} and '
        '{5.mean:.3f} ± {5.half:.3f}',
        [
            ((CELLS, f'coco/bbox_mAP{threshold}'), pattern)
            for pattern in ('*aft-conv*', '*_bccd_conv-stem_*', '*resnet18*')
            for threshold in ('', '_50')
        ],
    ),
    (
        REPRODUCTION,
        'its three seeds have {0.mean:.1f} ± {0.half:.1f} %',
        [(STREETS, 'upernet-aft*2400i*')],
    ),
    (
        REPRODUCTION,
        'reaches {0.mean:.1f} ± {0.half:.1f} % (three seeds; the difference is inconclusive, '
        'p = {1.p:.2f}) and ResNet-18, with six times the parameters, {2.mean:.1f} ± {2.half:.1f} % '
        '(three seeds), {3.mean:.1f} ± {3.half:.1f} more than AFT-conv (p = {3.p:.2f})',
        [
            (STREETS, '*pool*'),
            (STREETS, '*pool*', 'upernet-aft*2400i*'),
            (STREETS, '*resnet*'),
            (STREETS, '*resnet*', 'upernet-aft*2400i*'),
        ],
    ),
    (
        MIXERS,
        'LSH attention is {0.mean:.2f} ± {0.half:.2f} bits behind softmax attention '
        '(p = {0.p:.2f})',
        [(RECALL, 'reformer-*_seed?', SOFTMAX)],
    ),
    (
        MIXERS,
        'Performer is {0.mean:.2f} ± {0.half:.2f} bits behind AFT-conv (p = {0.p:.3f})',
        [(RECALL, 'performer-*_seed?', 'aft-conv-*2e_*_seed?')],
    ),
    (
        MIXERS,
        '(AFT-simple by {0.size:.3f} ± {0.half:.3f} bits, p = {0.p:.3f}; AFT-conv by {1.size:.3f} '
        '± {1.half:.3f}, p = {1.p:.3f})',
        [
            (LISTOPS, 'aft-simple-*', 'linear-*'),
            (LISTOPS, 'aft-conv-*2e_*', 'linear-*'),
        ],
    ),
    (
        MIXERS,
        'are behind average pooling (p = {0.p:.2f}, {1.p:.2f}, {2.p:.3f})',
        [(LISTOPS, other, 'pooling-*') for other in ('sparse-*', 'performer-*', 'reformer-*')],
    ),
    (
        MIXERS,
        'the depthwise convolution is behind it (p = {0.p:.2f}); AFT-simple and AFT-conv are not '
        'significantly ahead of linear attention (p = {1.p:.2f} and {2.p:.1f})',
        [
            (LISTOPS_HITS, 'depthwise-*', 'transformer-*'),
            (LISTOPS_HITS, 'aft-simple-*', 'linear-*'),
            (LISTOPS_HITS, 'aft-conv-*2e_*', 'linear-*'),
        ],
    ),
    (
        MIXERS,
        'with one seed at 69.1 %, p = {0.p:.4f})',
        [(PATHS, 'linear-*_seed?', 'identity-*_seed?')],
    ),
    (
        MIXERS,
        'ahead of strided attention (p = {0.p:.3f}), which is ahead of average pooling '
        '(p = {1.p:.2f})',
        [
            (PATHS, 'depthwise-*_seed?', 'sparse-*_seed?'),
            (PATHS, 'sparse-*_seed?', 'pooling-*_seed?'),
        ],
    ),
    (
        MIXERS,
        'AFT-conv is ahead of softmax attention (p = {0.p:.3f}), AFT-local (p = {1.p:.2f}), LSH '
        'attention and Performer (p = {2.p:.2f})',
        [(PATHS, CONV, f'{other}-*_seed?') for other in ('deit', 'aft-local2d', 'reformer')],
    ),
    (
        MIXERS,
        'attention have {0.mean:.1f} ± {0.half:.1f} and {1.mean:.1f} ± {1.half:.1f}',
        [
            (('synthetic_tasks/pathfinder_lower_rate', TOP1), f'{name}-*_seed?')
            for name in ('deit', 'linear')
        ],
    ),
    (
        SPEECH,
        'AFT-conv is ahead of softmax attention (p = {0.p:.2f}) and AFT-simple (p = {1.p:.2f}) in '
        'free spelling; its order relative to the Bi-LSTM is inconclusive (p = {2.p:.2f}). With '
        'the lexicon, AFT-conv, softmax attention and AFT-simple are ahead of the Bi-LSTM '
        '(p = {3.p:.3f}, {4.p:.2f}, {5.p:.2f})',
        [
            *((AN4, 'aft-conv*', other) for other in ('transformer*', 'aft-simple*', 'bi-lstm*')),
            *((AN4_WORDS, x, 'bi-lstm*') for x in ('aft-conv*', 'transformer*', 'aft-simple*')),
        ],
    ),
    (
        SPEECH,
        'no significant difference (p = {0.p:.2f})',
        [(('fsdd', WORDS), 'fsdd/init_peak:aft-conv*', 'aft-conv*')],
    ),
    (
        'docs/configs.md',
        '0.01 for u and v gives {0.mean:.4f} ± {0.half:.4f} bits/char more than 0.1',
        [(CLAIMS, 'init_std:factors-0.01_*', 'enwik8-window-32_*')],
    ),
]


@pytest.mark.parametrize(('page', 'sentence', 'claims'), SENTENCES)
def test_intervals_and_p_values_in_sentences_are_those_of_the_runs(page, sentence, claims):
    text = ' '.join(re.sub(r'[*]', '', text_of(page)).split()).replace('−', '-')
    expected = sentence.format(*(Claim(*claim) for claim in claims))
    assert expected in text


# Bounds of p that sentences give for several groups.
BOUNDS = [
    (IMAGENETTE, ('aft-full*', 'token-shift*', 'depthwise*'), 'deit*', 0.035),
    (CIFAR10, ('pooling*', 'identity*'), 'aft-conv*', 1e-4),
    (MNIST, ('aft-simple-*_seed?', CONV), SOFTMAX, 1e-4),
    (MNIST, (CONV,), 'aft-simple-*_seed?', 1e-4),
    (MNIST, ('aft-simple-*_seed?', 'aft-local-*_seed?'), SOFTMAX, 0.0115),
    (RECALL, ('aft-full-*_seed?', 'aft-local-*_seed?', 'aft-simple-*_seed?'), SOFTMAX, 1e-4),
    (RECALL, ('pooling-*_seed?', 'depthwise-*_seed?', 'lstm-*_seed?', CONV), SOFTMAX, 1e-4),
    (RECALL, ('aft-full-*_seed?', 'aft-local-*_seed?', CONV), 'synthesizer-*_seed?', 1e-3),
    (LISTOPS, ('aft-simple-*', 'aft-full-*', 'aft-local-*', 'aft-conv-*2e_*'), 'synth*', 2e-3),
    (PATHS, ('aft-simple-*_seed?', 'aft-full-*_seed?', 'deit-*_seed?'), 'pooling-*_seed?', 0.0135),
    (PATHS, ('reformer-*_seed?', 'performer-*_seed?'), 'pooling-*_seed?', 0.0135),
]


@pytest.mark.parametrize(('place', 'groups', 'other', 'bound'), BOUNDS)
def test_p_values_are_below_their_bounds(place, groups, other, bound):
    assert all(Claim(place, group, other).p < bound for group in groups)


def verdict_of(found, sign):
    return 'inconclusive' if found.p >= 0.05 else ('same' if found.mean * sign > 0 else 'opposite')


@pytest.mark.parametrize(('kind', 'column', 'best'), [('window', 1, 8), ('learned', 4, 32)])
def test_the_table_of_windows(kind, column, best):
    for cells in rows_of(REPRODUCTION, '| window | AFT-local'):
        numbers = values('claims', f'enwik8-{kind}-{cells[0]}_*', 'bits_per_char')
        assert reprinted(cells[column], mean_and_half(numbers)) == cells[column]
        if int(cells[0]) == best:
            assert cells[column + 1 : column + 3] == ['–', '–']
            continue
        claim = Claim(CLAIMS, f'enwik8-{kind}-{cells[0]}_*', f'enwik8-{kind}-{best}_*')
        assert reprinted(cells[column + 1], [claim.mean, claim.half]) == cells[column + 1]
        # In the papers a window of 32 is the best one.
        expected = -1 if kind == 'window' and cells[0] == '32' else 1
        assert cells[column + 2].startswith(verdict_of(claim, expected))


def test_the_table_of_changes_of_aft_local():
    names = {'free bias': ('free', 1), 'T 512': ('t-512', -1), 'T 1024': ('t-1024', -1)}
    names['softmax attention'] = ('softmax', -1)
    for cells in rows_of(REPRODUCTION, '| group | bits/char'):
        name, sign = names[cells[0]]
        numbers = values('claims', f'enwik8-{name}_*', 'bits_per_char')
        claim = Claim(CLAIMS, f'enwik8-{name}_*', 'enwik8-window-32_*')
        assert reprinted(cells[1], mean_and_half(numbers)) == cells[1]
        assert reprinted(cells[2], [claim.mean, claim.half]) == cells[2]
        assert cells[3].startswith(verdict_of(claim, sign))


def reference(name, key):
    return json.loads((RESULTS / 'references.json').read_text())[name][key]


def test_the_tables_of_bits_by_config():
    folders = {'enwik8': 'enwik8', 'mnist': 'mnist', 'cifar10': 'cifar10_pixels'}
    rows = rows_of(REPRODUCTION, '| config | seen in training')
    assert len(rows) == 5
    for name, _, test, *others in rows:
        name = name.strip('`')
        data = name.rpartition('_')[2].partition('-')[0]
        found = runs(folders[data], f'{name}*')
        metric = 'bits_per_char' if data == 'enwik8' else 'bits_per_dim'
        numbers = [run['metrics'][metric] for run in found]
        if 'strided' in test:
            numbers += [64, found[0]['tests']['strided64'][metric]]
        assert reprinted(test, numbers) == test
        for cell, key in zip(others, ('order 0', 'xz -9'), strict=True):
            assert reprinted(cell, [reference(data, key)]) == cell
    for name, _, test, train, *others in rows_of(REPRODUCTION, '| config | data | test | train'):
        data = name.strip('`').rpartition('_')[2]
        (run,) = runs({'celeba-8to32': 'celeba'}.get(data, 'chairs'), name.strip('`'))
        assert reprinted(test, [run['metrics']['bits_per_dim']]) == test
        assert reprinted(train, [run['tests']['train']['bits_per_dim']]) == train
        for cell, key in zip(others, ('order 0', 'xz -9', 'sorted points'), strict=True):
            assert cell == '' or reprinted(cell, [reference(data, key)]) == cell


def test_the_table_of_faces():
    (run,) = runs('celeba', 'aft-local2d-mini_1xb8-16e_celeba-8to32')
    networks = json.loads((RESULTS / 'celeba/srcnn.json').read_text())['rows']
    rows = {cells[0]: cells[1:] for cells in rows_of(REPRODUCTION, '| | PSNR, dB | SSIM')}
    for label, part in (
        ('a sample', 'sample'),
        ('the mean of four samples', 'mean'),
        ('bicubic enlargement', 'bicubic'),
    ):
        for cell, key in zip(rows[label], ('psnr_db', 'ssim', 'consistency_mse'), strict=True):
            assert reprinted(cell, [run['metrics'][f'{part}_{key}']]) == cell
    for cell, key in zip(
        rows['SRCNN, three seeds'], ('psnr_db', 'ssim', 'consistency_mse'), strict=True
    ):
        numbers = mean_and_half([row[key] for row in networks if row['model'] == 'SRCNN'])
        assert reprinted(cell, numbers[: 1 + ('±' in cell)]) == cell


def test_the_table_of_boxes_and_masks():
    rows = {cells[0]: cells[1:] for cells in rows_of(REPRODUCTION, '| | AP | AP at IoU 0.5')}
    (cars,), (persons,) = runs('masks', '*car*'), runs('masks', '*person*')
    for label, kind in (('cars, boxes', 'bbox'), ('cars, masks', 'segm')):
        for cell, ending in zip(rows[label], ('', '_50', '_75'), strict=True):
            assert reprinted(cell, [cars['metrics'][f'coco/{kind}_mAP{ending}']]) == cell
    names = 'coco/bbox_mAP_50', 'coco/segm_mAP_50'
    cell = rows['persons, boxes (masks), last epoch'][1]
    assert reprinted(cell, [persons['metrics'][name] for name in names]) == cell
    best = max(range(8), key=persons['val'][names[0]].__getitem__)
    assert persons['val']['step'][best] == 100
    cell = rows['persons, boxes (masks), epoch 100, the best of eight on these images'][1]
    assert reprinted(cell, [persons['val'][name][best] for name in names]) == cell


def test_the_table_of_new_speakers():
    speakers = ('george', 'jackson', 'lucas', 'nicolas', 'theo')
    (table,) = [table for table in TABLES if table.folder == 'fsdd']
    by_seed = {}
    for label, *cells in rows_of(SPEECH, '| new speaker'):
        errors = [
            values(f'fsdd/new_speakers/{name}', table.rows[label], WORDS) for name in speakers
        ]
        for cell, found in zip(cells, errors, strict=False):
            assert reprinted(cell, [statistics.mean(found)]) == cell
        by_seed[label] = [statistics.mean(found) for found in zip(*errors, strict=True)]
        assert reprinted(cells[-1], mean_and_half(by_seed[label])) == cells[-1]
    ahead = [
        difference(by_seed[one], by_seed[other]).p
        for one, other in (
            ('AFT-simple', 'AFT-conv'),
            ('softmax attention', 'AFT-conv'),
            ('AFT-conv', 'TDNN'),
        )
    ]
    sentence = '(p = {:.3f} and {:.2f}), and AFT-conv is ahead of TDNN (p = {:.3f})'
    assert sentence.format(*ahead) in ' '.join(text_of(SPEECH).split())


GLANCE = {
    'CIFAR-10, 40,000 images, 7 epochs': (CIFAR10, 'aft-conv*', 'deit*', 'depthwise*'),
    'CIFAR-10, 28 epochs': (LONGER, 'aft-conv*', 'deit*', 'depthwise*'),
    'Imagenette, 900 images': (IMAGENETTE, 'aft-conv*', 'deit*', 'token-shift*'),
    'MNIST, six minutes': (MNIST, CONV, SOFTMAX, 'depthwise-*_seed?'),
    'MNIST, 1.7 to 2.4 hours': (('mnist', 'bits_per_dim'), 'aft-conv*', None, None),
    'Multi30k': (('multi30k', 'bleu'), 'aft-local*', 'transformer*', None),
    'spoken digits': (('fsdd', WORDS), 'aft-simple*', 'transformer*', 'conformer*'),
    'AN4': (AN4_WORDS, 'aft-conv*', 'transformer*', 'bi-lstm*'),
    'blood cells': ((CELLS, 'coco/bbox_mAP_50'), '*aft-conv*', None, '*resnet18*'),
    'CamVid': (STREETS, 'upernet-aft*2400i*', None, '*resnet*'),
    'copies': (
        ('copy_task', 'percent_correct_sequences'),
        'aft-full-*',
        'transformer-*',
        'depthwise-*',
    ),
    'associative recall': (
        ('synthetic_tasks/mqar', 'percent_correct_tokens'),
        'aft-simple-*_seed?',
        SOFTMAX,
        'reformer-*_seed?',
    ),
    'ListOps': (LISTOPS_HITS, 'aft-simple-*', 'transformer-*', 'lstm-*'),
    'Pathfinder': (PATHS, CONV, 'deit-*_seed?', 'depthwise-*_seed?'),
}


@pytest.mark.parametrize('label', GLANCE)
def test_the_table_of_best_models(label):
    place, *patterns = GLANCE[label]
    rows = rows_of(REPRODUCTION, '| data | measure | AFT |')
    ((_, _, *cells),) = [cells for cells in rows if cells[0].startswith(label)]
    for cell, pattern in zip(cells, patterns, strict=False):
        if pattern is None:
            assert cell == '–'
            continue
        shown = re.search(r'[\d.]+ ± [\d.]+$', cell).group()
        assert reprinted(shown, mean_and_half(values(place[0], pattern, place[1]))) == shown


def test_single_runs_in_sentences():
    text = ' '.join(text_of(REPRODUCTION).split())
    digits = values('quickstart', '*', TOP1)
    assert ', '.join(f'{x:.1f}' for x in digits) + ' ([runs](results/quickstart' in text
    conv, full, deit, three, six = (
        values('cifar10', pattern, TOP1)[0]
        for pattern in ('aft-conv*_cifar10', 'aft-full*', 'deit*', '*_peak3', '*_peak6')
    )
    assert f'AFT-conv has {conv:.1f} %, AFT-full {full:.1f} and DeiT {deit:.1f}' in text
    assert f'0, 3 and 6 give {conv:.1f}, {three:.1f} and {six:.1f} % top-1' in text
    (longest,) = values('cifar10_full_64_epochs', '*', TOP1)
    assert f'AFT-conv has {longest:.1f} % ([run](' in text
    peaks = [
        values('enwik8_peak', f'{name}*_seed0', 'bits_per_char')[0]
        for name in ('peak3_', 'aft-', 'peak9_')
    ]
    assert 'gives {:.3f}, {:.3f} and {:.3f} bits/char'.format(*peaks) in text
    found = {}
    for name in ('transformer', 'aft-local'):
        (run,) = runs('warm_up', f'{name}*')
        records = records_of(run)
        losses = [loss for _, loss in trained(records, 'loss')]
        step, norm = max(trained(records, 'grad_norm'), key=lambda point: point[1])
        found[name] = statistics.mean(losses[-20:]) / math.log(2), norm, step
    (softmax, norm, step), (local, norm2, step2) = found.values()
    assert f'ends at {softmax:.2f} bits/char (mean of the last 20 iterations)' in text
    assert f'AFT-local-32 at {local:.2f}.' in text
    assert f'norms are {norm:.0f} in iteration {step} and {norm2:.0f} in iteration {step2}' in text
    chairs = runs('chairs', '*')[0]['metrics']
    shown = 'is 0.0080 squared edges and the coverage 37.5 %; 71.3 %'
    numbers = chairs['mmd_squared_edges'], chairs['coverage_percent'], chairs['1nna_percent']
    assert reprinted(shown, numbers) == shown and shown in text
    softmax, full = (
        runs('celeba', f'*{kind}_celeba-8to32_8-epochs')[0]['metrics']
        for kind in ('softmax-encoder', '1xb8-16e')
    )
    for run, sentence in (
        (softmax, 'has {:.3f} bits/dim and a PSNR of {:.2f} dB per sample'),
        (full, 'cross-attention has {:.3f} and {:.2f} dB'),
    ):
        assert sentence.format(run['bits_per_dim'], run['sample_psnr_db']) in text
    validated = [last('bits_per_char')('enwik8', f'aft-{name}*')[0] for name in ('conv', 'local')]
    shown = 'AFT-conv has {:.3f} bits/char; AFT-local-32, which saw a quarter less data, has {:.3f}'
    assert shown.format(*validated) in text


def test_errors_with_the_statistics_of_a_speaker():
    found = [
        statistics.mean(values('fsdd/per_speaker', f'{name}*', WORDS))
        for name in ('aft-conv', 'transformer', 'aft-simple')
    ]
    sentence = 'AFT-conv makes {:.1f} %, softmax attention {:.1f} %, AFT-simple {:.1f} % errors'
    assert sentence.format(*found) in ' '.join(text_of(SPEECH).split())
    assert not any(values('yesno', '*', WORDS))


MEASURED = [
    (model['Name'], result)
    for task in sorted(ROOT.glob('configs/*/metafile.yml'))
    for model in config_tables.read_metafile(task.parent)['Models']
    for result in model['Results']
    if 'Log' in result
]


@pytest.mark.parametrize(('name', 'result'), MEASURED)
def test_a_log_of_a_metafile_is_one_run_with_its_numbers(name, result):
    (run,) = selected(f'{ROOT}/{result["Log"]}').values()
    assert name.removesuffix('-voc') == run['config']
    tested = [run['metrics'], *run.get('tests', {}).values()]
    logged = [x for metrics in tested for x in metrics.values() if isinstance(x, int | float)]
    for text in result['Metrics'].values():
        assert text in [f'{value:.{len(text.partition(".")[2])}f}' for value in logged]


def test_the_files_of_runs_are_small_and_complete():
    files = [path for path in RESULTS.rglob('*') if path.is_file()]
    assert len(files) <= 120 and sum(path.stat().st_size for path in files) < 4e6
    configs = {path.stem for path in ROOT.glob('configs/*/*.py')}
    for path in FILES:
        lines = path.read_text().splitlines()
        found = read_lines(path)
        assert [json.loads(line)['name'] for line in lines] == sorted(found)
        for name, run in found.items():
            assert run['config'] in configs or run['config'] is None, name
            assert run['metrics'] and all(map(len, run.get('train', {}).values()))
            assert max(map(len, run.get('train', {'loss': ()}).values())) <= 200


FIGURES = [
    ('cifar10_full', '*', TOP1),
    ('copy_task', '*', None),
    ('enwik8_grid', '*_seed?', None),
    ('bccd_48_epochs', '*', 'loss'),
    ('camvid', '*2400i*', 'mIoU'),
    ('fsdd', '*', 'loss'),
    ('multi30k', '*', 'bits_per_subword'),
]


@pytest.mark.parametrize(('folder', 'pattern', 'metric'), FIGURES)
def test_curves_can_be_drawn_from_the_runs(folder, pattern, metric):
    groups = {}
    for run in runs(folder, pattern):
        groups.setdefault(run['name'].partition('_seed')[0], []).append(records_of(run))
    figure = draw_curves(groups, metric)
    (axis,) = figure.axes[-1:]
    assert len({line.get_color() for line in axis.get_lines()}) == len(groups)
    for records in itertools.chain(*groups.values()):
        assert validations(records, metric or BITS) or trained(records, 'loss')
