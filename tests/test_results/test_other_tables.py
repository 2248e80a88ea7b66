"""Tables of several folders of runs, or of other numbers than means."""

import json
import re
import statistics

import pytest

from aft_mm.analysis.verdicts import difference

from ..documents import text_of
from .shown import (
    AN4_WORDS,
    CELLS,
    CIFAR10,
    CLAIMS,
    CONV,
    IMAGENETTE,
    LISTOPS_HITS,
    LONGER,
    MNIST,
    PATHS,
    REPRODUCTION,
    RESULTS,
    SOFTMAX,
    SPEECH,
    STREETS,
    TOP1,
    WORDS,
    Claim,
    mean_and_half,
    reprinted,
    rows_of,
    runs,
    values,
)


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


def test_boxes_and_masks():
    text = ' '.join(text_of(f'{REPRODUCTION}/dense_prediction.md').split())
    (cars,), (persons,) = runs('masks', '*car*'), runs('masks', '*person*')
    shown = (
        'AP 0.325 of boxes (at IoU 0.5 and 0.75: 0.720 and 0.277), 0.313 of masks (0.684 and 0.172)'
    )
    boxes, masks = (
        [cars['metrics'][f'coco/{kind}_mAP{ending}'] for ending in ('', '_50', '_75')]
        for kind in ('bbox', 'segm')
    )
    assert reprinted(shown, [boxes[0], 0.5, 0.75, *boxes[1:], *masks]) == shown and shown in text
    names = 'coco/bbox_mAP_50', 'coco/segm_mAP_50'
    best = max(range(8), key=persons['val'][names[0]].__getitem__)
    numbers = [persons['metrics'][name] for name in names]
    numbers += [persons['val'][name][best] for name in names]
    shown = '0.049 (0.008) in the last epoch, 0.057 (0.053) in epoch 100'
    assert reprinted(shown, [*numbers, persons['val']['step'][best]]) == shown and shown in text


MODELS = {
    'AFT-conv': 'aft-conv*',
    'AFT-simple': 'aft-simple*',
    'softmax attention': 'transformer*',
    'TDNN': 'tdnn*',
    'Bi-LSTM': 'bi-lstm*',
}


def test_the_table_of_new_speakers():
    speakers = ('george', 'jackson', 'lucas', 'nicolas', 'theo')
    by_seed = {}
    for label, *cells in rows_of(SPEECH, '| new speaker'):
        patterns = [f'{MODELS[label]}_{name}_seed?' for name in speakers]
        errors = [values('fsdd/new_speakers', pattern, WORDS) for pattern in patterns]
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
    'CIFAR-10, 40,000 images, 7 epochs': (CIFAR10, 'aft-conv-mini*', 'deit*', 'depthwise*'),
    'CIFAR-10, 28 epochs': (LONGER, 'aft-conv-mini*', 'deit*', 'depthwise*'),
    'Imagenette, 900 images': (IMAGENETTE, 'aft-conv*', 'deit*', 'token-shift*'),
    'MNIST, six minutes': (MNIST, CONV, SOFTMAX, 'depthwise-*_seed?'),
    'MNIST, 1.7 to 2.4 hours': (('mnist', 'bits_per_dim'), 'aft-conv*', None, None),
    'Multi30k': (('multi30k', 'bleu'), 'aft-local*', 'transformer*', 'depthwise*'),
    'spoken digits': (('fsdd', WORDS), 'aft-simple*', 'transformer*', 'conformer*'),
    'AN4': (AN4_WORDS, 'aft-conv*', 'transformer*', 'depthwise*'),
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
    'pixels of CIFAR-10': (
        ('cifar10_full_pixels', TOP1),
        CONV,
        'deit-*_seed?',
        'depthwise-*_seed?',
    ),
}


@pytest.mark.parametrize('label', GLANCE)
def test_the_table_of_best_models(label):
    place, *patterns = GLANCE[label]
    rows = rows_of(REPRODUCTION, '| data | AFT |')
    ((_, *cells),) = [cells for cells in rows if cells[0].startswith(label)]
    for cell, pattern in zip(cells, patterns, strict=False):
        if pattern is None:
            assert cell == '–'
            continue
        shown = re.search(r'[\d.]+( ± [\d.]+)?$', cell).group()
        assert reprinted(shown, mean_and_half(values(place[0], pattern, place[1]))) == shown


def test_boxes_and_masks_from_a_start():
    found = json.loads((RESULTS / 'photos_from_start.json').read_text())
    boxes, masks = found['boxes'], found['masks']
    white, red, platelets = boxes['AP50 of classes'].values()
    assert round(sum((white, red, platelets)) / 3, 3) == boxes['AP50 by epoch']['12']
    pattern = 'retinanet-aft-conv-mini_1xb4-24e-conv*'
    steps = [run['iterations'] for run in runs('bccd', pattern)]
    random = values('bccd', pattern, 'coco/bbox_mAP_50')
    page = ' '.join(text_of('docs/tasks/own_data.md').split())
    assert (
        f'AP of {boxes["AP50 by epoch"]["12"]} at IoU 0.5 (white {white}, red {red}, platelets, of few '
        f'patches, {platelets}; one seed) after {boxes["steps"]} steps and '
        f'{boxes["cpu_seconds"] / 60:.0f} minutes of CPU time; random weights have '
        f'{statistics.mean(random):.3f} after {steps[0]}.'
    ) in page
    assert len(random) == 2 and f'mIoU of {masks["mIoU"]} % after 300 of 600 steps' in page
