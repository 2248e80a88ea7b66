"""Files of runs: size, names, the numbers of the metafiles, and their curves."""

import itertools
import json

import config_tables
import pytest

from aft_mm.analysis.plot_curves import draw_curves
from aft_mm.analysis.run_files import read_lines, records_of, selected
from aft_mm.analysis.run_logs import trained, validations

from ..helpers import each
from .shown import (
    BITS,
    FILES,
    RESULTS,
    ROOT,
    TOP1,
    runs,
)

MEASURED = [
    (model['Name'], result)
    for task in sorted(ROOT.glob('configs/*/metafile.yml'))
    for model in config_tables.read_metafile(task.parent)['Models']
    for result in model['Results']
    if 'Log' in result
]


@each('name, result', MEASURED)
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
