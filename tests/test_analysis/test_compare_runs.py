"""`aft_mm compare runs`: tables of work dirs."""

import csv
import json
import statistics
from pathlib import Path

import pytest
from mmengine.config import Config

from aft_mm.analysis.compare_runs import run_table
from aft_mm.analysis.model_complexity import analyse_config

from ..errors import stops
from ..helpers import ROOT, command

main = command('compare runs')

QUICKSTART = next((ROOT / 'configs' / 'image_classification').glob('aft-conv-quickstart_*.py'))


@pytest.fixture(autouse=True)
def work_dirs(here):
    for name, accuracy, seconds, change in (
        ('a0', 90.0, 0.25, {}),
        ('a1', 94.0, 0.5, {'randomness': dict(seed=1)}),
        ('b', 80.0, 1.0, {'model.backbone.arch.num_layers': 2, 'train_dataloader.batch_size': 16}),
    ):
        folder = Path(name, '20260101_000000/vis_data')
        folder.mkdir(parents=True)
        config = Config.fromfile(QUICKSTART)
        config.merge_from_dict({**change, 'work_dir': name})
        config.dump(folder / 'config.py')
        records = [
            {'loss': 1.0, 'time': time, 'epoch': 1, 'iter': i + 1, 'step': i + 1}
            for i, time in enumerate((9.0, seconds, seconds))
        ]  # the first one is slow
        records += [{'accuracy/top1': 10.0, 'step': 1}, {'accuracy/top1': accuracy, 'step': 2}]
        (folder / 'scalars.json').write_text('\n'.join(map(json.dumps, records)))


def test_a_row_per_config_in_every_format(capsys):
    main(['b', '--group', 'A_1|2', 'a0', 'a1', '--out', 'new/t.md', 'new/t.csv', 'new/t.tex'])
    counted = analyse_config(QUICKSTART)
    b, a = csv.DictReader(Path('new/t.csv').read_text(encoding='utf-8').splitlines())
    assert (a['run'], b['run']) == ('A_1|2', 'b')
    assert float(a['accuracy/top1 [%]']) == 92
    assert float(a['accuracy/top1 [%] standard error']) == 2
    assert float(b['accuracy/top1 [%]']) == 80 and b['accuracy/top1 [%] standard error'] == ''
    assert float(a['parameters [M]']) == counted['parameters'] / 1e6
    assert float(a['FLOPs [G]']) == counted['flops'] / 1e9
    assert float(b['FLOPs [G]']) < float(a['FLOPs [G]']) / 1.9
    assert float(a['samples/s']) == statistics.mean([64 / 0.25, 64 / 0.5])
    assert float(b['samples/s']) == 16
    markdown = Path('new/t.md').read_text(encoding='utf-8')
    assert capsys.readouterr().out == markdown
    assert r'| A_1\|2 | 92.0 ± 2.0 |' in markdown and '| b | 80.0 |' in markdown
    latex = Path('new/t.tex').read_text(encoding='utf-8')
    assert r'A\_1|2 & $92.0 \pm 2.0$ &' in latex and r'accuracy/top1 [\%]' in latex
    assert latex.startswith(r'\begin{tabular}{lrrrrr}')


@pytest.mark.parametrize(
    'change',
    [{'launcher': 'pytorch'}, {'train_dataloader.batch_sampler.type': 'LengthBatchSampler'}],
)
def test_samples_per_second_need_one_process_and_a_fixed_batch(capsys, change):
    path = Path('b/20260101_000000/vis_data/config.py')
    config = Config.fromfile(path)
    config.merge_from_dict(change)
    config.dump(path)
    main(['b'])
    header = capsys.readouterr().out
    assert 's/iteration' in header and 'samples/s' not in header


def test_missing_values_are_a_dash():
    runs = {'a': {'x': [1.5, 1.7], 'y': [2.0]}, 'b': {'x': [3.0]}}
    assert '| b | 3.00 | – |' in run_table(runs)
    assert run_table(runs, '.csv').splitlines() == [
        'run,x,x standard error,y',
        f'a,1.6,{statistics.stdev([1.5, 1.7]) / 2**0.5},2.0',
        'b,3.0,,',
    ]
    assert 'b & $3.00$ & -- ' in run_table(runs, '.tex')


def test_a_model_whose_flops_depend_on_its_boxes_has_none(capsys):
    path = Path('b/20260101_000000/vis_data/config.py')
    config = Config.fromfile(path)
    config.model.backbone.pop('img_size')
    config.dump(path)
    main(['b'])
    out, err = capsys.readouterr()
    assert "FLOPs of 'b' are omitted: --shape must be given for" in err
    assert 'parameters [M]' in out and 'FLOPs' not in out


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['no'], "'no' is not the work dir of a training"),
        (
            ['a0', '--metric', 'mIoU'],
            "--metric must be a validation metric of 'a0' .accuracy/top1., got mIoU",
        ),
        (
            ['--group', 'a', 'a0', 'b'],
            '--group a must have runs that differ by their seed only, got a '
            'difference in model, train_dataloader',
        ),
        (
            ['a0', '--out', 'a.html'],
            '--out must end in .md or .csv or .tex, got',
        ),
    ],
)
def test_bad_arguments_give_a_one_line_message(words, message):
    stops(message, main, words)
