"""tools/benchmarks/first_gpu_hour.py: order, time limits and records of its parts."""

import fnmatch
import importlib
import json
import shlex
from pathlib import Path

import first_gpu_hour
import pytest
import torch
from first_gpu_hour import PARTS, TIMED, Part
from mmengine.config import Config
from op_cases import CASES

from aft_mm.ops.triton.availability import KERNELS

from .errors import stops

ROOT = Path(__file__).parents[1]


@pytest.fixture
def hour(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(first_gpu_hour, 'device_name', lambda device: 'a GPU')

    def run(*parts, commit='one'):
        monkeypatch.setattr(first_gpu_hour, 'commit', lambda: commit)
        status = first_gpu_hour.main([str(tmp_path / 'out')], parts)
        summary = json.loads((tmp_path / 'out' / 'summary.json').read_text())
        return status, {row['name']: row for row in summary['parts']}

    return run


@pytest.fixture
def counted(tmp_path):
    def make(name, then=''):
        mark = tmp_path / f'mark-{name}'
        code = f'open({str(mark)!r}, "a").write("x"); {then}'
        return Part(name, 'a stub', f'-c {shlex.quote(code)}')

    def count(name):
        mark = tmp_path / f'mark-{name}'
        return len(mark.read_text()) if mark.exists() else 0

    return make, count


def test_without_a_gpu_it_is_a_one_line_error(tmp_path):
    if torch.cuda.is_available():
        pytest.skip('there is a GPU')
    stops('^Error: torch finds no CUDA device', first_gpu_hour.main, [str(tmp_path / 'out')])
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('content', [None, '{"rows": []}'])
def test_a_folder_with_other_files_is_refused(content, hour, counted, tmp_path):
    make, count = counted
    (tmp_path / 'out' / 'part').mkdir(parents=True)
    (tmp_path / 'out' / 'part' / 'mine').touch()
    if content:
        (tmp_path / 'out' / 'summary.json').write_text(content)
    with pytest.raises(SystemExit, match='OUT_DIR must be a new or empty folder'):
        hour(make('part'))
    assert (tmp_path / 'out' / 'part' / 'mine').exists() and count('part') == 0


def test_a_failing_part_is_recorded_and_the_others_run(hour, counted):
    make, count = counted
    parts = make('good'), make('bad', 'print("why"); raise SystemExit(3)'), make('last')
    status, rows = hour(*parts)
    assert status == 1
    assert [rows[name]['status'] for name in ('good', 'bad', 'last')] == ['ok', 'failed', 'ok']
    assert rows['bad']['exit_status'] == 3 and rows['bad']['last_line'] == 'why'
    status, rows = hour(*parts)
    assert [count(name) for name in ('good', 'bad', 'last')] == [1, 2, 1]
    assert status == 1 and rows['good']['status'] == 'ok'


def test_a_part_runs_with_its_backends(hour):
    code = '-c ' + shlex.quote('import os; print(os.environ.get("AFT_MM_BACKEND"))')
    _, rows = hour(Part('new', 'a stub', code, backends='cuda,eager'), Part('old', 'a stub', code))
    assert rows['new']['last_line'] == 'cuda,eager' and rows['old']['last_line'] == 'None'


def test_the_tools_accept_the_commands(tmp_path):
    assert len({part.name for part in PARTS}) == len(PARTS) and all(p.limit <= 600 for p in PARTS)
    checked = [op for part in PARTS if '--kernels' in part.command for op in part.words('')[5:]]
    assert sorted(checked) == sorted(KERNELS)
    assert set(fnmatch.filter(CASES, '*conv-b*h384-k11')) >= set(TIMED.split()[:2])
    for part in PARTS:
        words = part.words(tmp_path / part.name)
        tools = [i for i, word in enumerate(words) if word.endswith('.py')]
        if tools and part.name.startswith('training'):
            config = Config.fromfile(ROOT / words[tools[1]])
            assert words[words.index('--cfg-options') + 1] == 'train_cfg.max_epochs=1'
            assert config.train_cfg.max_epochs and '{' not in ' '.join(words)
        elif tools:
            module = importlib.import_module(Path(words[tools[0]]).stem)
            assert (ROOT / words[tools[0]]).is_file() and '{' not in ' '.join(words)
            args = module.parse_args([*words[tools[0] + 1 :], '--device', 'cpu'])
            assert args.json == tmp_path / part.name / 'result.json'
