"""Tables in the READMEs of configs/, compared with metafiles and papers."""

import re
import shutil
import sys
from pathlib import Path

import config_tables
import pytest
import yaml
from modelindex.load_model_index import load

from ..documents import ROOT, WRITTEN
from ..errors import stops
from .test_table_pages import FACTS

TASKS = 'copy_task synthetic_tasks image_ar image_classification language_modeling'.split()
TASKS += 'machine_translation point_cloud speech_recognition super_resolution'.split()
TASKS = [ROOT / 'configs' / task for task in TASKS]
SMALL = '<!-- table: small -->'
every_task = pytest.mark.parametrize('task', TASKS, ids=lambda task: task.name)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, 'argv', ['config_tables.py', *map(str, arguments)])
    with config_tables.user_errors(OSError):
        config_tables.main()


@pytest.fixture
def copy(tmp_path):
    return Path(shutil.copytree(ROOT / 'configs/point_cloud', tmp_path / 'point_cloud'))


def read_page(text):
    """Return the rows of the table of a page of docs/tables, by label."""
    lines = [
        [cell.strip() for cell in line.strip('|').split('|')]
        for line in text.splitlines()
        if line.startswith('|')
    ]
    (_, *headers), _, *rows = lines
    return {
        re.sub(r'\[(.+)\]\(.+\)', r'\1', first): dict(zip(headers, cells, strict=True))
        for first, *cells in rows
    }


def shown(metafile, model, result):
    tables = [
        name
        for other in (model['Results'] if 'Log' in result else [result])
        for name in other.get('Tables', [])
    ]
    return {
        entry
        for table in tables
        for columns in (metafile['Tables'][table], metafile['Pages'].get(table, {}))
        for entry in columns.values()
    }


def test_every_readme_is_up_to_date(monkeypatch, capsys):
    run(monkeypatch, '--check')
    assert capsys.readouterr().out == ''


@pytest.mark.parametrize(
    'file, there, edited',
    [
        ('metafile.yml', 'Bits/Dim (paper): 3.99', 'Bits/Dim (paper): 3.89'),
        ('metafile.yml', 'Bits/Dim: 4.271', 'Bits/Dim: 4.27'),
        ('metafile.yml', 'Parameters: 1777152', 'Parameters: 1887152'),
        ('README.md', '| 3.99 |\n', '| 3.9 |\n'),
        ('README.md', '| 3.99 |\n<!-- end', '| 3.99 |\n| another | 1 |\n<!-- end'),
    ],
)
def test_an_outdated_table_is_reported_and_updated(copy, monkeypatch, file, there, edited):
    run(monkeypatch, copy, '--check')
    before = (copy / file).read_text()
    assert there in before
    (copy / file).write_text(before.replace(there, edited))
    stops('^Error: the tables of .*README.md differ from', run, monkeypatch, copy, '--check')
    run(monkeypatch, copy)
    run(monkeypatch, copy, '--check')
    assert ((copy / 'README.md').read_text() == before) == (file == 'README.md')


@pytest.mark.parametrize(
    'file, there, edited, problem',
    [
        ('README.md', SMALL, SMALL.replace('small', 'large'), "'large' .* is not in Tables"),
        ('README.md', SMALL, '', "'small' .* is not in README.md, once"),
        (
            'README.md',
            '<!-- end of table -->\n\nThe paper',
            'The paper',
            "'I table 7' .* README.md, once",
        ),
        ('metafile.yml', 'Tables: [small]', 'Tables: [tiny]', "'small' .* is not in a Result"),
        ('metafile.yml', 'Models:', 'Models: [', 'metafile.yml is not YAML: .*'),
    ],
)
def test_a_table_without_its_counterpart_is_refused(
    copy, monkeypatch, file, there, edited, problem
):
    (copy / file).write_text((copy / file).read_text().replace(there, edited))
    stops(problem, run, monkeypatch, copy)


@every_task
def test_every_config_is_in_a_table(task):
    regions = ''.join(
        found[2] for found in config_tables.REGION.findall((task / 'README.md').read_text())
    )
    assert set(re.findall(r'\]\((.+?)\)', regions)) == {path.name for path in task.glob('*.py')}


@every_task
def test_every_number_of_the_metafile_is_shown(task):
    metafile = config_tables.read_metafile(task)
    for model in metafile['Others'] + metafile['Models']:
        for result in model['Results']:
            hidden = set(result.get('Metrics', {})) - shown(metafile, model, result)
            assert not hidden, (model['Name'], hidden)
        columns = set().union(*(shown(metafile, model, result) for result in model['Results']))
        assert set(model.get('Metadata', {})) - {'Label'} <= columns, model['Name']


@every_task
def test_numbers_measured_here_have_a_log(task):
    for model in config_tables.read_metafile(task)['Models']:
        for result in model['Results']:
            measured = {name for name in result.get('Metrics', {}) if '(paper)' not in name}
            assert bool(measured) == ('Log' in result), model['Name']


def test_the_model_index_reads_the_metafiles():
    index = load(str(ROOT / 'model-index.yml'))
    names = {path.stem for task in TASKS for path in task.glob('*.py')}
    assert names <= {model.name for model in index.models}
    for task in TASKS:
        for model in yaml.safe_load((task / 'metafile.yml').read_text())['Models']:
            for result in model['Results']:
                assert {'Task', 'Dataset'} <= set(result)
                for name, number in result.get('Metrics', {}).items():
                    assert isinstance(number, (int, float)), (model['Name'], name)


PAPERS = """
A table 2 | Transformer, L 24, d 256, 2 heads | train 2.90 | test 2.86 | iterations/s 1.36 | GB 30.4
A table 3 | AFT-local-256, L 24, d 256, bias not factorised | million parameters per layer 9.6 | train 2.82 | test 2.84
I table 2 | AFT-simple, L 24, d 256 | million parameters 20 | train 2.82 | test 2.89 | iterations/s 2.15 | GB 9.5
I table 2 | AFT-local-learned, L 24, d 256, d' 64 | million parameters 29 | train 2.75 | test 2.74 | iterations/s 1.67 | GB 12.8
L table 1 | linear attention | bits/dim 0.644 | images/s 142.8
L table 2 | softmax attention, stateful | bits/dim 3.47 | images/s 0.32
A table 7 | ResNet50, not in this package | million parameters 25.6 | top-1, % 76.9 | images/s 1257 | GB 6.5
A table 8 | DeiT base, 384 px, pretrained, not in this package | million parameters 86.9 | top-1, % 82.9 | images/s 89.6 | GB 13.6
A table 9 | AFT-full small, w not factorised | train loss 3.17 | top-1, % 78.2
A table 10 | AFT-conv small, 384 heads, 7×7 | train loss 2.94 | top-1, % 80.8
A table 11 | AFT-conv small, 384 heads, 25×25 | train loss 2.93 | top-1, % 80.7
A table 12 | AFT-conv small, 384 heads, 15×15, without query | top-1, % 79.5
A table 4 | Performer, L 12, d 512, 8 heads | million parameters – | train 1.002 | test 1.199 | iterations/s 1.44 | GB 10.1
A table 5 | AFT-local-8, L 24, d 256 | train 0.983 | test 1.162
A table 6 | AFT-local-32, L 24, d 256, T 4096 | train 0.945 | test 1.134
I table 3 | AFT-local-learned-32, L 24, d 256, T 2048 | million parameters 45 | train 0.942 | test 1.139 | iterations/s 0.97 | GB 21.9
I table 4 | AFT-simple (window 0), L 24, d 256 | train 1.046 | test 1.209
I table 7 | AFT-local-256, chair | train 3.67 | test 3.96
L section 4.3 | LSH-4, L 9, 6 heads | phoneme errors, % 9.33 | seconds per epoch 2250
I table 6 | AFT-local2d, 16 × 16, L 32, d 256 | million parameters 25 | train 2.39 | dev 2.59 | iterations/s 1.43 | GB 10.4
"""


def test_pages_print_what_the_papers_print():
    pages = {page['table']: page['page'] for page in FACTS['pages']}
    for line in PAPERS.strip().splitlines():
        name, row, *cells = line.split(' | ')
        table = read_page(WRITTEN[f'docs/tables/{pages[name]}.md'])
        for cell in cells:
            column, _, value = cell.rpartition(' ')
            assert table[row][f"paper's {column}"] == value, line


def test_a_table_has_the_columns_of_the_metafile_or_is_a_list():
    def model(label, parameters, test):
        return dict(
            Name=label,
            Config=f'configs/x/{test}.py',
            Metadata=dict(Label=label, Parameters=parameters),
            Results=[dict(Tables=['a'], Metrics={'Test (paper)': test, 'Train (paper)': '1'})],
        )

    columns = dict(parameters='Parameters', test='Test (paper)')
    models = [model('AFT-0', '7000001', '0'), model('AFT-1', '8000000', '1')]
    metafile = dict(
        Tables=dict(a=columns), Pages=dict(a=dict(train='Train (paper)')), Others=[], Models=models
    )
    assert config_tables.render(metafile, 'a') == (
        '| config | parameters | test |\n| --- | --- | --- |\n'
        '| [AFT-0](0.py) | 7.00 | 0 |\n| [AFT-1](1.py) | 8.00 | 1 |\n'
    )
    metafile['Tables']['a'] = {}
    assert config_tables.render(metafile, 'a') == 'Configs: [AFT-0](0.py),\n[AFT-1](1.py)\n'
