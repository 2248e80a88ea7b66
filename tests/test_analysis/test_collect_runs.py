"""`aft_mm compare collect`: lines of work dirs, logs and metrics, and what selects them."""

import json
from pathlib import Path

import pytest

from aft_mm.analysis import run_files
from aft_mm.analysis.collect_runs import commit, origin, processor
from aft_mm.analysis.run_files import append_line, read_lines, records_of
from aft_mm.analysis.run_logs import read_scalars, seconds_at, trained, validations

from ..errors import stops
from ..helpers import command

main = command('compare collect')


def log(seed, length=50, epochs=5, loss=2.0):
    """Return a log like that of mmengine: a record every 10 iterations, an epoch's validation."""
    records = []
    for epoch in range(1, epochs + 1):
        for number in range(10, length + 1, 10):
            step = (epoch - 1) * length + number
            entries = dict(lr=1e-3, loss=loss / step + seed / 7, grad_norm=1 / step, time=0.125)
            records.append({**entries, 'epoch': epoch, 'iter': step, 'step': step})
        records.append({'seconds_per_epoch': 6.25, 'step': epoch})
        records.append({'accuracy/top1': 50 + epoch + seed / 3, 'time': 0.1, 'step': epoch})
    return records


@pytest.fixture(autouse=True)
def folder(here):
    for seed in (0, 1):
        for name in ('a', 'b'):
            text = ''.join(json.dumps(record) + '\n' for record in log(seed))
            Path(f'{name}-mini_seed{seed}.jsonl').write_text(text)
            metrics = {'accuracy/top1': 60.0 + seed + (name == 'b'), 'lr': 1e-3}
            Path(f'{name}-mini_seed{seed}.json').write_text(json.dumps(metrics))


def collect(*words):
    main([*words, '--out', 'runs.jsonl'])
    return read_lines(Path('runs.jsonl'))


def everything():
    return sorted(map(str, Path().glob('?-*.json*')))


def test_a_log_and_its_metrics_are_one_line(capsys):
    runs = collect(*everything())
    assert capsys.readouterr().out == 'wrote 4 runs to runs.jsonl\n'
    names = ['a-mini_seed0', 'a-mini_seed1', 'b-mini_seed0', 'b-mini_seed1']
    assert list(runs) == names == sorted(runs)
    run = runs['b-mini_seed1']
    assert (run['config'], run['seed'], run['lr']) == ('b-mini', 1, 1e-3)
    assert run['metrics'] == {'accuracy/top1': 62.0}
    assert (run['iterations'], run['epoch_length'], run['seconds']) == (250, 50, 31.2)
    assert 'grad_norm' not in run['train'] and list(run['val']) == ['step', 'accuracy/top1']


def test_curves_are_those_of_the_log():
    records = log(1)
    again = records_of(collect('a-mini_seed1.jsonl')['a-mini_seed1'])
    assert trained(again, 'loss') == [
        (step, float(f'{loss:.6g}')) for step, loss in trained(records, 'loss')
    ]
    for (step, value), (other, exact) in zip(
        validations(again, 'accuracy/top1'), validations(records, 'accuracy/top1'), strict=True
    ):
        assert step == other and value == pytest.approx(exact, rel=1e-5)
    times = [seconds_at(found, [100, 250]).tolist() for found in (records, again)]
    assert times[0] == pytest.approx(times[1], abs=0.1)


def test_long_curves_keep_evenly_spaced_points_and_the_last_one():
    run = collect('a-mini_seed0.jsonl', '--points', '7', '--metric', 'loss', 'grad_norm')
    train = run['a-mini_seed0']['train']
    assert train['iter'] == [10, 50, 90, 130, 170, 210, 250]
    assert train['grad_norm'][-1] == 0.004 and list(train) == ['iter', 'loss', 'grad_norm']
    assert run['a-mini_seed0']['metrics']['accuracy/top1'] == 55.0  # of the last validation


def test_runs_of_the_same_name_are_replaced_and_others_stay():
    collect(*everything())
    Path('a-mini_seed0.json').write_text('{"accuracy/top1": 1.0}')
    runs = collect('a-mini_seed0.json')
    assert len(runs) == 4 and runs['a-mini_seed0']['metrics'] == {'accuracy/top1': 1.0}
    assert runs['b-mini_seed0']['metrics'] == {'accuracy/top1': 61.0}


def test_a_work_dir_tells_its_config_seed_command_and_versions(tool, config, tmp_path):
    path = Path('tiny.py')
    path.write_text(f'_base_ = {config("tiny_pixels")!r}\n')
    words = ['tiny.py', '--work-dir', 'work_seed4', '--cfg-options', 'train_cfg.max_epochs=1']
    tool('train').main([*words, 'randomness.seed=4'])
    Path('work_seed4/metrics.json').write_text('{"bits_per_dim": 7.5}')
    run = collect('work_seed4')['work_seed4']
    assert (run['config'], run['seed'], run['metrics']) == ('tiny', 4, {'bits_per_dim': 7.5})
    assert run['command'].startswith('aft_mm train ') and 'randomness.seed=4' in run['command']
    assert run['machine'] == f'{processor()}, cpu with 1 thread' and run['lr'] > 0
    assert run['commit'] == commit() and run['loops'] is False  # AFT-local has none
    records = read_scalars('work_seed4')
    assert run['iterations'] == trained(records, 'loss')[-1][0]
    assert run['val']['bits_per_dim'] == [
        float(f'{value:.6g}') for _, value in validations(records, 'bits_per_dim')
    ]


def test_versions_and_machine_are_those_of_the_text_log():
    folder = Path('a_seed0/20260101_000000')
    (folder / 'vis_data').mkdir(parents=True)
    (folder / 'vis_data/scalars.json').write_text('{"loss": 1.0, "iter": 1, "step": 1}\n')
    (folder / 'a.log').write_text(
        'System environment:\n    sys.platform: linux\n    Python: 3.11.7 (main) [GCC 12.2.0]\n'
        '    GPU 0: NVIDIA H100 80GB HBM3\n    PyTorch: 2.11.0+cu130\n    MMEngine: 0.10.7\n'
        '2026/01/01 - mmengine - INFO - Model with 10 parameters on cuda, torch 2.11.0\n'
        f'2026/01/01 - mmengine - INFO - {origin()}\n'
        '2026/01/01 - mmengine - INFO - native backend used for aft_conv in float32\n'
    )
    run = collect('a_seed0')['a_seed0']
    assert run['loops'] is True and run['commit'] == commit()
    assert run['versions'] == dict(Python='3.11.7', PyTorch='2.11.0+cu130', MMEngine='0.10.7')
    assert run['machine'] == f'{processor()}, linux, NVIDIA H100 80GB HBM3, cuda'
    assert 'command' not in run and run['seed'] == 0


def test_an_output_of_a_benchmark_is_a_line_as_it_stands():
    content = dict(environment=dict(commit='1'), rows=[dict(model='a', milliseconds=1.5)])
    Path('speed.json').write_text(json.dumps(content))
    assert collect('speed.json')['speed'] == {'name': 'speed', **content}


def test_seeds_are_compared_by_a_pattern_as_by_their_files(capsys):
    collect(*everything())
    capsys.readouterr()
    groups = {'a': 'a-mini_seed{}.json', 'b': 'b-mini_seed{}.json'}
    files = [['--group', name, *map(files.format, (0, 1))] for name, files in groups.items()]
    command('compare seeds')(['--metric', 'accuracy/top1', *files[0], *files[1]])
    expected = capsys.readouterr().out
    selections = ['--group', 'a', 'runs.jsonl:a-*', '--group', 'b', 'runs.jsonl:b-*_seed?']
    command('compare seeds')(['--metric', 'accuracy/top1', *selections])
    assert capsys.readouterr().out == expected
    assert '| a | 2 | 60.50 ± 6.35 |' in expected


def test_runs_are_plotted_and_listed_by_a_pattern(capsys):
    collect(*everything())
    groups = ['--group', 'a', 'runs.jsonl:a-*', '--group', 'b', 'b-mini_seed0.jsonl']
    options = ['--over', 'time', '--metric', 'accuracy/top1']
    command('plot curves')([*groups, *options, '--out', 'curves.png'])
    assert 'plotted 3 runs to curves.png' in capsys.readouterr().out
    command('compare runs')(['--group', 'a', 'runs.jsonl:a-*', '--metric', 'accuracy/top1'])
    out = capsys.readouterr().out
    assert '| run | accuracy/top1 [%] | s/iteration |' in out
    assert '| a | 55.17 ± 0.17 | 0.1248 ± 0.0000 |' in out


@pytest.mark.parametrize('ending', ['', '{"name": "b_seed', '{"name": "b", "metrics": {}}'])
def test_a_line_is_added_after_an_interrupted_one(ending):
    path = Path('runs.jsonl')
    path.write_text('{"name": "a", "metrics": {}}\n' + ending)
    append_line(path, {'name': 'c', 'metrics': {}})
    names = [json.loads(line)['name'] for line in path.read_text().splitlines()]
    assert names == ['a', *['b'] * ending.endswith('}}'), 'c']
    append_line(path, {'name': 'a', 'metrics': {'x': 1}})
    assert read_lines(path)['a']['metrics'] == {'x': 1}  # the last line of a name counts


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['no'], "RUN must be a folder, .jsonl or .json, got 'no'"),
        (['a.png'], "RUN must be a folder, .jsonl or .json, got 'a.png'"),
        (['runs.jsonl'], "RUN must be another file than --out, got 'runs.jsonl' for both"),
        (['list.json'], "'list.json' must hold metrics or rows by name"),
        (['half.json'], "'half.json' is damaged or not JSON: "),
        (['a-mini_seed0.json', '--points', '0'], '--points must be an int, 1 or larger, got 0'),
    ],
)
def test_bad_arguments_give_a_one_line_message(words, message):
    Path('list.json').write_text('[1]')
    Path('half.json').write_text('{"a": 1')
    Path('a.png').write_text('')
    Path('runs.jsonl').write_text('')
    stops(message, main, [*words, '--out', 'runs.jsonl'])


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        ('runs.jsonl:c-*', "'runs.jsonl:c-.' has no run; the file has a-mini_seed0, .*, \\.\\.\\."),
        ('no.jsonl:*', "'no.jsonl' cannot be read: No such file"),
        ('text.jsonl:*', "'text.jsonl' is not a file of runs: 'text' is no JSON with a name"),
    ],
)
def test_selections_without_a_run_are_refused(argument, message):
    collect(*everything())
    Path('text.jsonl').write_text('text\n')
    words = ['--metric', 'accuracy/top1', '--group', 'a', argument]
    stops(message, command('compare seeds'), words)
    assert run_files.is_selection(argument)
