"""Tables of comparisons are those of their runs."""

import math
import re
import statistics
from typing import NamedTuple

import pytest

from aft_mm.analysis.verdicts import difference

from ..documents import text_of
from .shown import (
    BITS,
    MIXERS,
    REPRODUCTION,
    SPEECH,
    TOP1,
    WORDS,
    entry,
    mean_and_half,
    milliseconds,
    reprinted,
    rows_of,
    runs,
    values,
)


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


def minus(other, metric, folder_of_other=None):
    def numbers(folder, pattern):
        reference = values(folder_of_other or folder, other, metric)
        found = difference(values(folder, pattern, metric), reference)
        return [found.mean, (found.interval[1] - found.interval[0]) / 2]

    return numbers


def iteration(folder, pattern):
    times = milliseconds(folder.replace('enwik8_peak', 'enwik8_grid'))
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


CONTROLS = {
    'depthwise convolution (control)': 'depthwise*',
    'token shift (control)': 'token-shift*',
    'average pooling (control)': 'pooling*',
    'no mixing (control)': 'identity*',
    'AFT-conv': 'aft-conv-mini*',
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
HYBRIDS = {
    'AFT-simple, then softmax attention': 'hybrid-aft-simple-*',
    'AFT-full, then softmax attention': 'hybrid-aft-full-*',
    'softmax attention, then AFT-simple': 'hybrid-transformer-aft-simple-*',
    'softmax attention, then AFT-full': 'hybrid-transformer-aft-full-*',
    'token shift, then softmax attention': 'hybrid-token-shift-*',
    'no mixing, then softmax attention': 'hybrid-identity-*',
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


def at_360(folder, pattern):
    """Return the training loss of iterations 320 to 360 of each run [bits/dim]."""
    curves = [run['train'] for run in runs(folder, pattern)]
    losses = [
        [x for step, x in zip(c['iter'], c['loss'], strict=True) if 320 <= step <= 360]
        for c in curves
    ]
    assert {len(found) for found in losses} == {5}
    return [statistics.mean(found) / math.log(2) for found in losses]


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
        CONTROLS | {'AFT-conv, signed (ours)': 'signed_*'},
        {1: mean(TOP1), 2: minus('aft-conv-mini*', TOP1)},
    ),
    Table(
        REPRODUCTION,
        '| mixer | accuracy, %, mean of three seeds | minus AFT-conv |',
        'cifar10_full',
        CONTROLS | {'AFT-conv, signed (ours)': 'aft-conv-signed*'},
        {1: mean(TOP1), 2: minus('aft-conv-mini*', TOP1)},
    ),
    Table(
        REPRODUCTION,
        '| mixer | accuracy, %, mean of three seeds | of seeds',
        'cifar10_full_28_epochs',
        {label: CONTROLS[label] for label in (*list(CONTROLS)[:1], 'AFT-conv', [*CONTROLS][-1])},
        {1: mean(TOP1), 2: each('metrics', TOP1), 3: minus('aft-conv-mini*', TOP1)},
    ),
    Table(
        REPRODUCTION,
        '| mixer | parameters, M | ms per iteration',
        'mnist_six_minutes',
        each_seed(ON_MNIST),
        {
            2: iteration,
            3: images,
            4: rate,
            5: mean('bits_per_dim'),
            6: lambda *place: mean_and_half(at_360(*place)),
        },
    ),
    Table(
        REPRODUCTION,
        '| self-attention of the decoder',
        'multi30k',
        {
            'AFT-simple': 'aft-simple*',
            'softmax, 4 heads': 'transformer*',
            'AFT-local-16': 'aft-local*',
            'depthwise convolution over 16 tokens': 'depthwise*',
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
            3: iteration,
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
        '| backbone | parameters, M | AP',
        'bccd_48_epochs',
        {
            'AFT-conv, convolutional stem': 'retinanet-aft-conv*',
            'average pooling, convolutional stem': '*_bccd_conv-stem_*',
            'average pooling, one seed': 'retinanet-pooling-mini_1xb4-24e_bccd_seed*',
            'ResNet-18 with a feature pyramid': 'retinanet-resnet18*',
        },
        {
            2: mean('coco/bbox_mAP'),
            3: mean('coco/bbox_mAP_50'),
            4: mean('coco/bbox_mAP_75'),
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
            '`upernet-aft-conv-mini_1xb4-1200i_camvid`, one seed': 'upernet-aft-conv-mini_1xb4-1200i*',
            '`fcn-aft-conv-mini_1xb4-1200i_camvid`, one seed': 'fcn*',
        },
        {1: mean('mIoU'), 2: mean('aAcc')},
    ),
    *(
        Table(
            MIXERS,
            '| mixer | bits per answer',
            f'synthetic_tasks/{task}',
            each_seed(ON_TOKENS | (HYBRIDS if task == 'mqar' else {})),
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
        '| model | words | words, lexicon',
        'an4',
        {
            'AFT-conv': 'aft-conv*',
            'softmax attention': 'transformer*',
            'Bi-LSTM': 'bi-lstm*',
            'AFT-simple': 'aft-simple*',
            'depthwise convolution': 'depthwise*',
            'average pooling': 'pooling*',
            'token shift': 'token-shift*',
            'no mixing': 'identity*',
        },
        {1: mean(WORDS), 2: mean(f'lexicon/{WORDS}')},
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
            'depthwise convolution': 'depthwise*',
            'no mixing': 'identity*',
            'average pooling': 'pooling*',
            'token shift': 'token-shift*',
            'TDNN': 'tdnn*',
            'Bi-LSTM': 'bi-lstm*',
        },
        {1: mean(WORDS), 2: mean(f'lexicon/{WORDS}')},
    ),
]


def learned_length(folder, pattern):
    base = re.sub('(-nearest|-interpolate)?-t2048', '', pattern)
    return each('metrics', 'bits_per_char')(folder, base)


TABLES.append(
    Table(
        'docs/mixers.md',
        '| position bias | at 512',
        'longer',
        {
            "AFT-full, d' 64, `nearest`": 'full-nearest-t2048_seed?',
            "AFT-full, d' 64, `interpolate`": 'full-interpolate-t2048_seed?',
            'AFT-full, 8 heads, `linear`': 'full-linear-t2048_seed?',
            'AFT-full, 8 heads, `log`': 'full-log-t2048_seed?',
            "AFT-local-32, d' 64, `nearest`": 'local-32-nearest-t2048_seed?',
            "AFT-local-32, d' 64, `interpolate`": 'local-32-interpolate-t2048_seed?',
            'AFT-conv, 4 heads, kernel 31': 'conv-t2048_seed?',
            'AFT-simple': 'simple-t2048_seed?',
            'AFT-decay': 'decay-t2048_seed?',
        },
        {1: learned_length, 2: each('metrics', 'bits_per_char')},
    )
)


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


def test_equal_iterations_on_mnist():
    conv, convolution, simple, softmax = (
        at_360('mnist_six_minutes', f'{ON_MNIST[label]}_seed?')
        for label in [*ON_MNIST][:3] + ['softmax attention, 4 heads']
    )
    shown = []
    for group, other in ((conv, convolution), (conv, softmax), (simple, softmax)):
        found = difference(group, other)
        half = (found.interval[1] - found.interval[0]) / 2
        shown += [f'{abs(found.mean):.3f} ± {half:.3f}', found.p]
    sentence = (
        'it is {} ahead of AFT-conv (p = {:.3f}), which is {} ahead of softmax attention; '
        "AFT-simple's {} are *inconclusive*"
    )
    assert sentence.format(*shown[:3], shown[4]) in ' '.join(text_of(REPRODUCTION).split())
    assert shown[3] < 1e-4 and shown[5] > 0.05
