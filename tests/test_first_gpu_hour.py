"""What tools/benchmarks/first_gpu_hour.sh runs, what it leaves out, and what it writes down."""

import importlib
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / 'tools' / 'benchmarks'
sys.path.insert(0, str(TOOLS))

import first_gpu_hour  # noqa: E402
from first_gpu_hour import DTYPES, PARTS, Part  # noqa: E402

from aft_mm.ops.triton.availability import KERNELS  # noqa: E402


@pytest.fixture
def hour(monkeypatch, tmp_path):
    """Run parts as if there were a GPU, at commit 'one' unless told otherwise."""
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
    """A part that leaves a mark each time that it runs, and the number of its marks."""

    def make(name, then=''):
        mark = tmp_path / f'mark-{name}'
        code = f'open({str(mark)!r}, "a").write("x"); {then}'
        return Part(name, 'a stub', f'-c {shlex.quote(code)}')

    def count(name):
        mark = tmp_path / f'mark-{name}'
        return len(mark.read_text()) if mark.exists() else 0

    return make, count


def test_without_a_gpu_it_is_one_sentence_and_nothing_is_written(tmp_path):
    if torch.cuda.is_available():
        pytest.skip('there is a GPU')
    command = ['bash', TOOLS / 'first_gpu_hour.sh', tmp_path / 'out']
    done = subprocess.run(
        command, capture_output=True, text=True, env={'PYTHON': sys.executable, 'PATH': '/bin'}
    )
    assert done.returncode == 1 and done.stdout == ''
    assert done.stderr.splitlines()[-1].startswith('Error: torch finds no CUDA device')
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('content', [None, '{"rows": []}'])
def test_a_folder_of_something_else_is_left_alone(content, hour, counted, tmp_path):
    make, count = counted
    (tmp_path / 'out' / 'part').mkdir(parents=True)
    (tmp_path / 'out' / 'part' / 'mine').touch()
    if content:
        (tmp_path / 'out' / 'summary.json').write_text(content)
    with pytest.raises(SystemExit, match='OUT_DIR must be a new or empty folder'):
        hour(make('part'))
    assert (tmp_path / 'out' / 'part' / 'mine').exists() and count('part') == 0


def test_a_part_that_fails_is_recorded_and_stops_no_other(hour, counted):
    make, count = counted
    parts = make('good'), make('bad', 'print("why"); raise SystemExit(3)'), make('last')
    status, rows = hour(*parts)
    assert status == 1
    assert [rows[name]['status'] for name in ('good', 'bad', 'last')] == ['ok', 'failed', 'ok']
    assert rows['bad']['exit_status'] == 3 and rows['bad']['last_line'] == 'why'
    # What ended well is not run again, what failed is.
    status, rows = hour(*parts)
    assert [count(name) for name in ('good', 'bad', 'last')] == [1, 2, 1]
    assert status == 1 and rows['good']['status'] == 'ok'


def test_another_commit_or_command_is_another_measurement(hour, counted):
    make, count = counted
    hour(make('part'))
    hour(make('part'), commit='two')
    assert count('part') == 2
    hour(make('part', 'print(1)'), commit='two')
    hour(make('part', 'print(1)'), commit='two')
    assert count('part') == 3


def test_what_was_stopped_in_the_middle_runs_again(hour, counted, monkeypatch, tmp_path):
    make, count = counted

    def interrupted(*args):
        (tmp_path / 'out' / 'part' / 'result.json').write_text('half of ')
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(first_gpu_hour, 'call', interrupted)
        hour(make('part'))
    status, rows = hour(make('part'))
    assert status == 0 and count('part') == 1 and rows['part']['status'] == 'ok'


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(hour, tmp_path):
    mark = tmp_path / 'mark'
    child = f'import time; time.sleep(3); open({str(mark)!r}, "w")'
    code = f'import subprocess, sys; subprocess.run([sys.executable, "-c", {child!r}])'
    start = time.monotonic()
    status, rows = hour(Part('slow', 'a stub', f'-c {shlex.quote(code)}', limit=1))
    assert status == 1 and rows['slow']['status'] == 'timed out'
    time.sleep(max(0, start + 4.5 - time.monotonic()))
    assert not mark.exists()


def test_a_program_that_is_missing_is_a_sentence(hour):
    part = Part('check', 'a stub', 'no-such-program --tool x', needs='no-such-program')
    status, rows = hour(part)
    assert status == 0 and rows['check']['status'] == 'skipped'
    assert rows['check']['last_line'] == 'no-such-program is not installed'


def test_the_summary_holds_what_was_measured_but_no_profiles(hour, tmp_path):
    rows = '[dict(case="a", milliseconds=2.5, kernels=dict(k=1.0), profile=[1])]'
    code = f'import json, sys; json.dump(dict(rows={rows}), open(sys.argv[1], "w"))'
    _, found = hour(Part('part', 'a stub', f'-c {shlex.quote(code)} {{out}}/result.json'))
    assert found['part']['results'] == [dict(case='a', milliseconds=2.5)]
    text = (tmp_path / 'out' / 'summary.txt').read_text()
    assert text.startswith('a GPU\npart') and ' ok ' in text


def test_a_dry_run_lists_what_is_left(hour, counted, tmp_path, capsys, monkeypatch):
    make, count = counted
    hour(make('first'))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    capsys.readouterr()
    parts = make('first'), make('second')
    assert first_gpu_hour.main([str(tmp_path / 'out'), '--dry-run'], parts) == 0
    lines = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[::2]]
    assert lines == [['first', 'finished'], ['second', 'to']] and count('second') == 0


def test_every_part_has_a_name_of_its_own_and_ends_within_ten_minutes():
    assert len({part.name for part in PARTS}) == len(PARTS) and all(p.limit < 600 for p in PARTS)
    assert {'tests', 'memcheck', 'racecheck', 'data'} <= {part.name for part in PARTS}
    # Every kernel is checked, in each type, in a part of its own.
    checked = sorted(part.name for part in PARTS if '--verify' in part.command)
    kernels = [op.removeprefix('aft_') for op in KERNELS]
    assert checked == sorted(f'verify-{op}-{dtype}' for op in kernels for dtype in DTYPES)


# The models are the same at every size and in every form.
TOOL_PARTS = [
    part
    for part in PARTS
    if '.py' in part.command and (part.name[:6] != 'models' or part.name.endswith('224-compiled'))
]


@pytest.mark.parametrize('part', TOOL_PARTS, ids=lambda part: part.name)
def test_the_commands_are_those_that_the_tools_take(part, tmp_path, monkeypatch):
    words = part.words(tmp_path / part.name)
    tool = next(i for i, word in enumerate(words) if word.endswith('.py'))
    module = importlib.import_module(Path(words[tool]).stem)
    assert (ROOT / words[tool]).is_file() and '{' not in ' '.join(words)
    if part.name == 'data':
        written = []
        monkeypatch.setattr(module, 'write_images', lambda *args: written.append(args))
        monkeypatch.setattr(module, 'write_text', lambda *args: written.append(args))
        module.main(words[tool + 1 :])
        assert all(str(place).startswith(str(tmp_path / 'data')) for place, _ in written)
        return
    args = module.parse_args(words[tool + 1 :])
    assert args.json == tmp_path / part.name / 'result.json'
    assert 'config' not in args or (ROOT / args.config).is_file()
