"""Tables of docs/benchmarks/ are those that the outputs in docs/results/benchmarks give."""

import re
from pathlib import Path

import benchmark_sampling
import numpy as np
import pytest

from aft_mm.analysis.run_files import read_lines

from ..documents import text_of
from .shown import reprinted, rows_of

PAGE = 'docs/benchmarks'
FOLDER = Path(__file__).parents[2] / 'docs/results/benchmarks'
TYPES = 'float32', 'bfloat16', 'int8'


def rows(file, *names):
    found = read_lines(FOLDER / f'{file}.jsonl')
    return [row for name in names for row in found[name]['rows'] if 'reason' not in row]


def only(found, **entries):
    (row,) = [row for row in found if entries.items() <= row.items()]
    return row


def check(cell, *numbers):
    assert reprinted(cell, numbers) == cell


def test_backbones_against_deit():
    sentence = (
        'is 1.21 (float32, aim 1.2) and 1.56 times (bfloat16, aim 1.4) as fast as DeiT-tiny at 224 px, '
        'and 3.89 times at 512 px in bfloat16. AFT-conv small with 384 heads is 1.07 (aim 1.1) and '
        '1.27 times as fast as DeiT-small at 224 px, 1.43 (aim 1.6) and 2.41 times at 512 px'
    )
    assert sentence in ' '.join(text_of(PAGE).split())
    for kind, heads, size, dtype, over_deit, over_bound in (
        ('tiny', 'h32', '224', 'float32', '1.21', '0.94'),
        ('tiny', 'h32', '224', 'bfloat16', '1.56', '0.83'),
        ('tiny', 'h32', '512', 'bfloat16', '3.89', '0.84'),
        ('small', 'h384', '224', 'float32', '1.07', '0.95'),
        ('small', 'h384', '224', 'bfloat16', '1.27', '0.86'),
        ('small', 'h384', '512', 'float32', '1.43', '0.97'),
        ('small', 'h384', '512', 'bfloat16', '2.41', '0.79'),
    ):
        name = f'{kind}_{size}_{dtype}' if (kind, size) != ('small', '512') else 'small_512'
        row = only(rows('backbones', name), model=f'aft-{kind}-{heads}-k11', dtype=dtype)
        check(over_deit, row['speed_vs_deit'])
        check(over_bound, row['speed_vs_bound'])


RUNTIMES = {
    'OpenVINO': 'openvino',
    'OpenVINO with loops': 'openvino-loops',
}
MODELS = {
    'DeiT-tiny': 'deit-tiny',
    'AFT-conv tiny h32 k11': 'aft-tiny-h32-k11',
    'convnext_femto': 'convnext_femto',
}


def test_images_per_second_without_matrix_units():
    measured = rows('runtimes_zen4', 'tiny_224_batch1')
    for label, *cells in rows_of(PAGE, '| images per CPU second | DeiT-tiny | AFT-conv'):
        runtime, dtype = label.split(', ')
        for cell, model in zip(cells, MODELS.values(), strict=True):
            if cell != '–':
                kind = dict(model=model, runtime=RUNTIMES[runtime], dtype=dtype)
                check(cell, only(measured, **kind)['images_per_second'])


def measured_at(label):
    """Return DeiT's size, the rows and AFT-conv's name of a row such as 'small, 224 px, 16 images'."""
    *size, px, images = label.replace('1,024', '1024').split(', ')
    kind = size[0] if size else 'tiny'
    batch = 1 if images == 'one image' else 16
    found = rows('runtimes_zen4', f'{kind}_{px.removesuffix(" px")}_batch{batch}')
    aft = next(row['model'] for row in found if row.get('model', '').startswith('aft'))
    return kind, found, aft


def test_each_model_in_its_fastest_runtime_without_matrix_units():
    for label, speeds, fastest, _, *others in rows_of(PAGE, '| float32, bfloat16, int8 over DeiT'):
        kind, found, aft = measured_at(label)
        ratio = f'speed_vs_deit-{kind}'
        check(fastest, only(found, best_of=aft, of='/'.join(TYPES))[ratio])
        models = aft, aft.replace('aft', 'bound'), 'convnext_femto'
        for cell, model in zip((speeds, *others), models, strict=True):
            if cell != '–':
                check(cell, *(only(found, best_of=model, of=dtype)[ratio] for dtype in TYPES))


def test_bfloat16_with_matrix_units():
    for label, *cells in rows_of(PAGE, '| bfloat16 | eager: over DeiT'):
        kind, px = label.replace('1,024', '1024').removesuffix(' px').split(', ')
        measured = rows('runtimes', f'{kind}_{px}_batch1_bfloat16')
        eager, fastest = {}, {}
        for row in measured:
            if row.get('runtime') == 'eager' and 'model' in row:
                eager[row['model'].partition('-')[0]] = row['images_per_second']
            if 'best_of' in row:
                fastest[row['best_of'].partition('-')[0]] = row
        check(cells[0], eager['aft'] / eager['deit'])
        check(cells[1], eager['aft'] / eager['bound'])
        check(cells[2], fastest['aft'][f'speed_vs_deit-{kind}'])
        speeds = [fastest[model]['images_per_second'] for model in ('aft', 'bound')]
        check(cells[3], speeds[0] / speeds[1])
        check(cells[4], fastest['bound'][f'speed_vs_deit-{kind}'])


def test_a_training_step_of_a_decoder():
    names = ('training_step', 'training_step_bfloat16')
    models = {
        'AFT-local-256': 'aft-local-256',
        'softmax attention, 4 heads': 'softmax',
        'dense masked AFT-local': 'dense-aft-local-256',
    }
    for label, *cells in rows_of(PAGE, '| decoder | time over AFT-local'):
        for cell, name in zip(cells, names, strict=False):
            found = rows('training_step', name)
            row = only(found, model=models[label]) if label in models else found[-1]
            times = [row['time_over_local']]
            times += [row['milliseconds']] * ('ms' in cell)
            check(cell, *times)


def test_tiles():
    forms = {
        'each image alone': 0,
        'whole': 1,
        'tiles of 512 px': 2,
        'tiles of 512 px that overlap by 128': 3,
    }
    found = rows('megapixels', 'tiles')
    for label, *cells in rows_of(PAGE, '| | mIoU, % | at seams'):
        row = found[forms[label]]
        keys = 'miou', 'seam_accuracy', 'seconds'
        for cell, key in zip(cells, keys, strict=True):
            if cell:
                check(cell, row[key])


def test_images_of_megapixels():
    found = rows('megapixels', 'inference_512_1024', 'inference_2048_4096', 'inference_2048_deit')
    models = {'DeiT-tiny': 'deit-tiny', 'AFT-conv tiny h32 k11': 'aft-tiny-h32-k11'}
    for label, *cells in rows_of(PAGE, '| inference, s, MiB'):
        for cell, size in zip(cells, (512, 1024, 2048, 4096), strict=False):
            if cell != '–':
                kind = dict(model=models.get(label, label), size=size)
                row = next(row for row in found if kind.items() <= row.items())
                seconds, mib = cell.split(', ')
                check(seconds, 1 / row['images_per_second'])
                check(mib, row['peak_mib'])


def test_mixers_against_the_length():
    found = rows('lengths', 'attention')
    for label, slopes, *cells in rows_of(PAGE, '| mixer | slope from 4,096 on'):
        mixer = label.lower()
        for slope, kind in zip(slopes.replace('*', '').split(', '), ('ms', 'mib'), strict=True):
            points = [(row['length'], row.get(kind)) for row in found if row['mixer'] == mixer]
            lengths, costs = zip(
                *[x for x in points if x[0] >= 4096 and x[1]] or [(1, 1)], strict=True
            )
            if slope != '–':
                check(slope, np.polyfit(np.log(lengths), np.log(costs), 1)[0])
        for cell, length in zip(cells, (512, 8192, 16384, 65536), strict=False):
            if cell != '–':
                check(cell, only(found, mixer=mixer, length=length)['ms'])
        if cells[-1] != '–':
            check(cells[-1], only(found, mixer=mixer, length=65536)['mib'])
    fast, slow = (only(found, mixer=x, length=8192)['ms'] for x in ('aft-simple', 'softmax'))
    text = ' '.join(text_of('docs/benchmarks.md').split())
    assert f'at 8,192 tokens AFT-simple is [{slow / fast:.1f} times]' in text
    mib = [
        only(found, mixer=x, length=65536)['mib'] for x in ('aft-simple', 'aft-local-32', 'linear')
    ]
    memory = '65,536 tokens take {:,.0f} MiB with AFT-simple, {:,.0f} with AFT-local-32, and {:,.0f} with'
    assert memory.format(*mib) in text


def test_decoding_of_lsh_with_a_state():
    text = ' '.join(text_of(PAGE).split())
    for data in ('mnist', 'cifar10'):
        found = rows('sampling', f'{data}_batch1_states')
        names = 'lsh-4', 'softmax', 'linear', 'aft-simple'
        lsh, softmax, *others = (only(found, mixer=name)['estimated_seconds'] for name in names)
        digits = 1 if data == 'mnist' else 0
        assert f'{lsh / softmax:.1f} times' in text
        assert f'({lsh:.{digits}f} and {softmax:.{digits}f} s; ' in text
        for seconds in others:
            assert re.search(rf'; .*\b{seconds:.{digits}f}\b.*`{data}_batch1_states`', text)


SAMPLED = {'softmax, cache': 'softmax', 'linear': 'linear', 'AFT-simple': 'aft-simple'}
SAMPLED['AFT-local-32'] = 'aft-local'


def test_sampling():
    one, many = rows('sampling', 'mnist_batch1'), rows('sampling', 'mnist_batch64')
    first = only(one, mixer='softmax')
    several = only(many, mixer='softmax')
    for label, *cells in rows_of(PAGE, '| model | one image, s'):
        if label not in SAMPLED:  # the paper's
            continue
        row = only(one, mixer=SAMPLED[label])
        check(cells[0], row['seconds'])
        check(cells[1], first['seconds'] / row['seconds'])
        check(cells[2], row['step_ms'])
        check(cells[3], row['step_ms'] / row['products_ms'])
        if cells[4] != 'not measured':
            row = only(many, mixer=SAMPLED[label])
            speed = several['estimated_seconds'] / row['estimated_seconds']
            check(cells[4], 64 / row['estimated_seconds'], speed)


def test_latencies_of_the_linear_paper():
    measured = rows('sampling', 'mnist_batch1', 'mnist_batch1_wall', 'mnist_batch1_lsh_wall')
    measured += rows('sampling', 'cifar10_batch1')
    shown = 0
    for label, *cells in rows_of(PAGE, '| seconds on a CPU, a GPU'):
        form = 'stateless' if 'without' in label or 'LSH' in label else 'steps'
        for data, (printed, here) in (('mnist', cells[:2]), ('cifar10', cells[2:])):
            entries = dict(data=data, mixer=label.split()[0].strip(',').lower(), form=form)
            if printed != '–':
                cpu, _, gpu = benchmark_sampling.PAPER[tuple(entries.values())]
                assert printed == f'{cpu}, {gpu}'
                shown += 1
            if here != '–':
                row = next(row for row in measured if entries.items() <= row.items())
                check(here, row['seconds'] or row['estimated_seconds'])
    assert shown == len(benchmark_sampling.PAPER)


def test_ops_in_cpp():
    found = rows('ops', 'conv', 'simple', 'decay')
    cases = {
        '`aft_conv`, 128': 'conv-b128-14x14-d384-h384-k11',
        '2 × 50×84': 'conv-b2-50x84-d256-h256-k27',
        '`aft_simple`': 'simple-b64-t1024-d256',
        '`aft_decay`': 'decay-b8-t512-d256',
        'not causal': 'decay-whole-b2-t2048-d512',
    }
    for label, *cells in rows_of(PAGE, '| op | forward: speed over eager'):
        (case,) = [case for begin, case in cases.items() if label.startswith(begin)]
        modes = [
            only(found, case=case, form='native', mode=mode, dtype='float32')
            for mode in ('forward', 'forward+backward')
        ]
        speeds = [speed for mode in modes for speed in mode['speed_over'].values()]
        assert all(list(mode['speed_over'])[0] == 'eager' for mode in modes)
        compared = [cell for cell in cells[:4] if cell != '–']
        for cell, speed in zip(compared, speeds, strict=False):
            check(cell, speed)
        eager = only(found, case=case, form='eager', mode='forward+backward', dtype='float32')
        check(cells[4], modes[1]['peak_mib'], eager['peak_mib'])


@pytest.mark.parametrize('path', sorted(FOLDER.glob('*.jsonl')), ids=lambda path: path.stem)
def test_outputs_have_different_names(path):
    assert len(read_lines(path)) == len(path.read_text().splitlines())


def test_accuracy_and_speed_of_one_file_of_a_trained_network():
    measured = rows('runtimes', 'tiny_224_batch1_trained')
    forms = ('onnxruntime', 'float32'), ('openvino', 'float32'), ('openvino', 'int8')
    models = {
        'EfficientNet-Lite0': ('efficientnet_lite0', ''),
        'DeiT-tiny': ('deit-tiny', ''),
        'AFT-conv tiny h32 k11, with loops': ('aft-tiny-h32-k11', '-loops'),
    }
    table = rows_of(PAGE, '| trained model | ONNX Runtime')
    assert len(table) == 4
    for label, *cells in table:
        name, what = label.split(': ')
        key = 'accuracy' if what.startswith('accuracy') else 'images_per_second'
        model, loops = models[name]
        for cell, (runtime, dtype) in zip(cells, forms, strict=True):
            row = only(measured, model=model, runtime=runtime + loops, dtype=dtype)
            check(cell, row[key])
            assert row.get('num_pictures', 300) == 300
