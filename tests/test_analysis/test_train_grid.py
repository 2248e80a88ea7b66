"""tools/analysis_tools/train_grid.py: runs, their order and learning rates."""

import json
from pathlib import Path

import pytest
import train_grid

from aft_mm.engine.hooks.sanity import DIVERGED

from ..errors import stops

RATE = 'optim_wrapper.optimizer.lr'
GRID = 'a.py b.py --out out --rates 1e-4 1e-3 --seeds 5 6'.split()
GRID += ['--short', 'data.samples=8', '--cfg-options', 'data.samples=80']


def lines(folder='out'):
    """Return the runs of a folder by name; the last line of a name counts."""
    texts = Path(folder, 'runs.jsonl').read_text().splitlines()
    return {run['name']: run for run in map(json.loads, texts)}


def keep(kept, **changes):
    """Leave only the runs for which `kept` is true, and change the others' entries."""
    found = [run | changes.get(name, {}) for name, run in lines().items() if kept(name)]
    Path('out/runs.jsonl').write_text(''.join(json.dumps(run) + '\n' for run in found))


@pytest.fixture
def runs(here, monkeypatch):
    found = []

    def run_tool(tool, words, log):
        words = [str(word) for word in words]
        options = words[words.index('--cfg-options') + 1 :]
        work_dir = Path(words[words.index('--work-dir') + 1])
        if tool == 'test.py':
            assert work_dir.name == 'test'  # the config of the training stays
            assert words[1] == str(work_dir.parent / 'epoch_1.pth')
            assert options == ['data.samples=80']
            Path(words[words.index('--out') + 1]).write_text('{"bits_per_char": 2.5}')
            return
        found.append((work_dir.name + ' resumed' * ('--resume' in words), options))
        rate = float(next(o for o in options if o.startswith('optim')).partition('=')[2])
        bits = 3.0 - 0.1 * ((rate == 1e-4) == (words[0] == 'a.py'))
        scalars = work_dir / '1' / 'vis_data' / 'scalars.json'
        scalars.parent.mkdir(parents=True, exist_ok=True)
        scalars.write_text(json.dumps(dict(bits_per_char=bits, step=1)) + '\n')
        (work_dir / 'last_checkpoint').write_text(str(work_dir / 'epoch_1.pth'))
        if Path('interrupt').exists():
            Path('interrupt').unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(train_grid, 'run_tool', run_tool)
    for name in ('a.py', 'b.py'):
        Path(name).touch()
    return found


def test_rates_first_then_seed_after_seed_each_at_its_best_rate(runs, capsys):
    train_grid.main(GRID)
    names = 'a_lr0.0001 a_lr0.001 b_lr0.0001 b_lr0.001 a_seed5 b_seed5 a_seed6 b_seed6'
    assert [name for name, _ in runs] == names.split()
    options = dict(runs)
    rate = f'{RATE}=0.0001'
    short = ['data.samples=80', 'data.samples=8', rate, 'randomness.seed=5']
    assert options['b_lr0.0001'] == short
    assert options['a_seed6'] == ['data.samples=80', 'randomness.seed=6', rate]
    assert options['b_seed6'][-1] == 'optim_wrapper.optimizer.lr=0.001'
    b = lines()['b_seed5']
    assert (b['metrics'], b['lr'], b['seed'], b['config']) == (
        dict(bits_per_char=2.5),
        1e-3,
        5,
        'b',
    )
    assert lines()['a_seed5']['val'] == dict(step=[1], bits_per_char=[2.9])
    assert lines()['a_lr0.001']['metrics'] == dict(bits_per_char=3.0)
    assert capsys.readouterr().out.splitlines()[-1] == 'b_seed6 2.5'


def test_the_rate_of_the_greatest_metric(runs):
    train_grid.main([*GRID, '--rule', 'greater'])
    assert [lines()[f'{name}_seed5']['lr'] for name in 'ab'] == [1e-3, 1e-4]


def test_a_second_call_makes_the_missing_runs(runs, capsys):
    train_grid.main([*GRID, '--minutes', '0'])
    assert runs == [] and capsys.readouterr().out == 'stopped before all runs were done\n'
    train_grid.main([*GRID, '--seeds', '5'])
    keep(lambda name: name != 'b_seed5')
    runs.clear()
    train_grid.main([*GRID, '--seeds', '5', '7'])
    assert [name for name, _ in runs] == ['b_seed5', 'a_seed7', 'b_seed7']
    runs.clear()
    keep(lambda name: True, a_seed7=dict(lr=1e-3))  # not the best rate
    train_grid.main([*GRID, '--seeds', '5', '7'])
    assert [name for name, _ in runs] == ['a_seed7']
    capsys.readouterr()
    train_grid.main([*GRID, '--seeds', '5', '7'])
    assert capsys.readouterr().out == 'nothing to train: all results are in out\n'


def test_an_interrupted_run_resumes_with_the_same_options_only(runs):
    for options in ([], [], ['--amp']):
        Path('interrupt').touch()
        with pytest.raises(KeyboardInterrupt):
            train_grid.main([*GRID, *options])
    assert [name for name, _ in runs] == ['a_lr0.0001', 'a_lr0.0001 resumed', 'a_lr0.0001']
    train_grid.main(GRID)
    keep(lambda name: name != 'a_lr0.0001')
    runs.clear()
    train_grid.main(GRID)
    assert [name for name, _ in runs] == ['a_lr0.0001']  # complete runs are repeated


def test_a_rate_with_a_non_finite_loss_is_not_used(runs, monkeypatch):
    run_tool = train_grid.run_tool

    def diverge(tool, words, log):
        if f'{RATE}=0.0001' in words:
            raise train_grid.UserError(f'{DIVERGED} 3 is nan at a learning rate of 0.0001')
        run_tool(tool, words, log)

    monkeypatch.setattr(train_grid, 'run_tool', diverge)
    train_grid.main(GRID)
    assert {lines()[f'{name}_seed6']['lr'] for name in 'ab'} == {1e-3}
    failed = lines()['a_lr0.0001']
    assert failed['metrics']['bits_per_char'] is None and DIVERGED in failed['error']
    with pytest.raises(SystemExit, match='--rates must include one with a finite loss'):
        train_grid.main(['a.py', '--out', 'all', '--rates', '1e-4', '1e-4'])


@pytest.mark.parametrize(
    'words, message',
    [
        ('a.py ./a.py', 'CONFIG must be files of different names, got a.py twice'),
        ('a.py no.py', "'no.py' is not a config file"),
        ('a.py --rates 1e-4 1e-3 --metric top1', '--rule must be less or greater for .* top1'),
        (
            'a.py --rates 1e-4 1e-3 --rule less --metric loss',
            "--metric must be .* of the runs, got 'loss'",
        ),
    ],
)
def test_bad_arguments_give_a_one_line_message(runs, words, message):
    stops(message, train_grid.main, [*words.split(), '--out', 'out'])


def test_a_failed_run_reports_the_reason(tmp_path):
    log = tmp_path / 'a.log'
    with pytest.raises(train_grid.UserError, match='train.py no.py failed with status .*no.py'):
        train_grid.run_tool('train.py', ['no.py'], log)
