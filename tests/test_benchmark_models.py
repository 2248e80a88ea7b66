"""What the tools that time whole models check, write and draw."""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import pytest
import torch

from aft_mm.ops import eager

TOOLS = Path(__file__).parents[1] / 'tools/benchmarks'
OTHERS = Path(__file__).parents[1] / 'docs/results/ops/conv.json'
sys.path.insert(0, str(TOOLS))

import benchmark_attention  # noqa: E402
import benchmark_efficiency  # noqa: E402
import benchmark_models  # noqa: E402
import benchmark_ops  # noqa: E402
import benchmark_sampling  # noqa: E402
import decoders  # noqa: E402
import plot_models  # noqa: E402
import training_step  # noqa: E402

COMMON = ['--device', 'cpu', '--threads', '1', '--rounds', '1']


def run(tool, *arguments):
    command = [sys.executable, TOOLS / tool, *COMMON, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def doubled(function):
    return lambda *args, **options: 2 * function(*args, **options)


def test_cost_against_length(tmp_path):
    path, png, again = tmp_path / 'out.json', tmp_path / 'out.png', tmp_path / 'again.png'
    mixer = 'aft_mm.AFTLocalHard(window=3)'
    text = run(
        'benchmark_efficiency.py', '--mixers', mixer, '--dims', 16, 24, '--lengths', 32, 64,
        '--positions', 8, 16, '--steps', 2, '--dtype', 'bfloat16', '--json', path,
        '--png', png)  # fmt: skip
    assert text.count('slope') == 2 * 4 and text.count('from position 8 to 16') == 2
    content = json.loads(path.read_text())
    assert content['environment']['settings']['mixers'] == [mixer]
    assert content['environment']['device_name'] and 'commit' in content['environment']
    rows = {(row['dims'], row['length']): row for row in content['rows']}
    assert len(rows) == 2 * 4
    for dims in (16, 24):
        for kind in benchmark_efficiency.KINDS:
            measured = [n for n in (8, 16, 32, 64) if rows[dims, n][kind] is not None]
            assert measured == ([8, 16] if kind == 'decoding_ms' else [32, 64])
        # A CPU has one clock.
        for kind in ('forward', 'training'):
            assert rows[dims, 32][f'{kind}_wall_ms'] == rows[dims, 32][f'{kind}_ms'] > 0
    picture = matplotlib.image.imread(png)
    # Two rows of panels with something in them.
    assert picture.shape[0] > 700 and len({tuple(p) for p in picture[::3, ::3].reshape(-1, 4)}) > 20
    benchmark_efficiency.main(['--device', 'cpu', '--replot', str(path), '--png', str(again)])
    assert (matplotlib.image.imread(again) == picture).all()


def test_cost_per_sample_against_length(tmp_path, monkeypatch, capsys):
    path, png = tmp_path / 'out.json', tmp_path / 'out.png'
    monkeypatch.setattr(benchmark_attention, 'in_fresh_process', lambda call, *args: call(*args))
    benchmark_attention.main([
        *COMMON, '--mixers', 'linear', '--dims', '16', '--heads', '2', '--lengths', '64', '256',
        '--tokens', '256', '--json', str(path), '--png', str(png)])  # fmt: skip
    assert capsys.readouterr().out.count('slope') == 2
    rows = json.loads(path.read_text())['rows']
    assert [(row['mixer'], row['length']) for row in rows] == [('linear', 64), ('linear', 256)]
    assert all(row['ms'] > 0 and row['mib'] >= 0 for row in rows)
    assert matplotlib.image.imread(png).std() > 0.05


def test_cost_per_sample_is_that_of_the_batch_over_its_size(monkeypatch):
    times = {('linear', 64): 6.0, ('linear', 512): 6.0}
    monkeypatch.setattr(benchmark_attention, 'sweep', lambda make, args, clock: (times, times))
    monkeypatch.setattr(benchmark_attention, 'in_fresh_process', lambda *call: 12.0)
    args = ['--device', 'cpu', '--mixers', 'linear', '--tokens', '256']
    rows = benchmark_attention.measure(benchmark_attention.parse_args(args))
    assert [(row['ms'], row['mib']) for row in rows] == [(1500.0, 3.0), (6000.0, 12.0)]


def test_cost_per_sample_in_pieces(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark_attention, 'check', lambda *args: None)
    monkeypatch.setattr(benchmark_attention, 'in_fresh_process', lambda *call: 12.0)
    path = tmp_path / 'out.json'
    common = ['--device', 'cpu', '--tokens', '256', '--add', '--json', str(path)]

    def piece(seconds, *words):
        sweep = {('linear', 64): seconds, ('linear', 512): seconds}
        monkeypatch.setattr(benchmark_attention, 'sweep', lambda make, args, clock: (sweep, sweep))
        benchmark_attention.main([*common, '--mixers', 'linear', '--lengths', '64', '512', *words])
        content = json.loads(path.read_text())
        assert content['environment']['settings']['mixers'] == ['linear']
        return [(row.get('ms'), row.get('mib')) for row in content['rows']]

    assert piece(6.0, '--kinds', 'ms') == [(1500, None), (6000, None)]
    assert piece(5.0, '--kinds', 'mib') == [(1500, 3.0), (6000, 12.0)]
    assert piece(4.0, '--kinds', 'ms') == [(1000, 3.0), (4000, 12.0)]
    with pytest.raises(SystemExit):
        piece(4.0, '--dims', '128')
    assert 'was measured with dims 256, now it is 128' in capsys.readouterr().err


def test_a_mixer_whose_steps_disagree_is_not_timed(monkeypatch):
    monkeypatch.setattr(eager, 'linear_attention', doubled(eager.linear_attention))
    with pytest.raises(SystemExit, match='linear step by step'):
        benchmark_attention.main(['--device', 'cpu', '--mixers', 'linear', '--dims', '16'])


def test_a_decoder_with_a_wrong_op_is_not_timed(monkeypatch, tmp_path):
    path = tmp_path / 'out.json'
    monkeypatch.setattr(eager, 'aft_local_hard', doubled(eager.aft_local_hard))
    with pytest.raises(SystemExit, match='aft-local-hard-3.* is wrong by .*: not timed'):
        benchmark_efficiency.main(['--mixers', 'aft-local-hard-3', *COMMON, '--json', str(path)])
    assert not path.exists()


def test_what_takes_too_long_is_left_out():
    args = argparse.Namespace(
        lengths=[8, 16, 32], mixers=['a', 'b'], patience=-1, rounds=1, device='cpu'
    )
    assert benchmark_efficiency.sweep(lambda *cell: lambda: None, args) == ({}, {})
    args.patience = 100
    assert [len(t) for t in benchmark_efficiency.sweep(lambda *cell: lambda: None, args)] == [6, 6]

    def make(name, length):
        def call():
            if name == 'b' and length > 8:
                raise torch.OutOfMemoryError

        return call

    fitting, walls = benchmark_efficiency.sweep(make, args)
    assert set(fitting) == set(walls) == {('a', 8), ('a', 16), ('a', 32), ('b', 8)}


@pytest.mark.parametrize('name, expected', [
    ('aft-local-learned-5', dict(type='aft_mm.AFTLocalLearned', rank=64, window=5)),
    ('aft_mm.AFTSimple', dict(type='aft_mm.AFTSimple')),
    ('aft_mm.AFTLocal(window=5, rank=None)', dict(type='aft_mm.AFTLocal', window=5, rank=None)),
])  # fmt: skip
def test_mixers_by_name(name, expected):
    assert decoders.mixer(name, heads=2) == expected


ALLOWED = 'must be one of aft-simple, .* aft-local-WINDOW, .* or a registered mixer'


@pytest.mark.parametrize('name', [
    'aft-conv-5', 'aft-local', 'aft-local-0', 'resnet', '', 'aft_mm.Nope', 'aft_mm.AFTLocal(5)',
    'aft_mm.AFTLocal(window=32', 'aft_mm.AFTLocal(window=five)', 'aft_mm.AFTLocal(**5)',
    'aft_mm.AFTLocal(window=3) or (4)', 'aft_mm.AFTLocal(window=3).op(window=4)',
])  # fmt: skip
def test_a_mixer_without_a_meaning_is_refused(name):
    with pytest.raises(ValueError, match=f'{ALLOWED}.*got {re.escape(repr(name))}'):
        decoders.mixer(name, heads=2)


TOOLS_AND_OPTIONS = {
    benchmark_attention: ['--lengths', '--tokens', '--dims', '--heads'],
    benchmark_efficiency: ['--lengths', '--positions', '--dims', '--layers', '--heads', '--batch'],
    benchmark_models: ['--size', '--batch'],
    benchmark_ops: [],
    benchmark_sampling: ['--batch', '--images'],
    training_step: ['--tokens', '--dims', '--layers', '--window', '--batch'],
}
WRONG = [
    *((t, [o, '0'], f'{o}: must be a whole number of at least 1, got .0.')
      for t, options in TOOLS_AND_OPTIONS.items() for o in ['--rounds', '--threads', *options]),
    *((t, ['--device', name], f'--device: must be {allowed}, got {name!r}')
      for t in TOOLS_AND_OPTIONS
      for name, allowed in [('foo', 'cpu, cuda or cuda:INDEX'), ('cuda:x', 'cpu, cuda or .*'),
                            ('cuda', 'one of the 0 GPUs found')]),
    (benchmark_efficiency, ['--mixers', 'aft-simple', 'aft-conv-5'],
     f'--mixers aft-conv-5 .*{ALLOWED}'),
    (benchmark_efficiency, ['--mixers', 'aft_mm.AFTLocal(window=3'], ALLOWED),
    (benchmark_efficiency, ['--mixers', 'aft_mm.AFTLocalHard(foo=3, window=2)'],
     "--mixers aft_mm.* no argument 'foo'"),
    (benchmark_efficiency, ['--mixers', 'softmax', '--dims', '16', '33', '--heads', '8'],
     '--mixers softmax with --dims 33: num_heads must be an int that divides embed_dims=33, got 8'),
    (training_step, ['--dims', '33'], '--dims: num_heads must be an int that divides embed_dims'),
    (benchmark_models, ['--models', 'aft-tiny-h33-k11'], 'tiny-h33-k11: num_heads must be an int'),
    (benchmark_models, ['--models', 'bound-tiny-h32-k4'], 'k4: kernel_size must be odd'),
    (benchmark_models, ['--size', '33'], '--size: must be a multiple of 16'),
    (benchmark_efficiency, ['--replot', 'no.json'], '--replot: must be a JSON .*No such file'),
    (benchmark_efficiency, ['--replot', str(OTHERS)], "conv.json, which"),
    (benchmark_efficiency, ['--replot', __file__], '--replot: must be a JSON that this tool'),
]  # fmt: skip


@pytest.mark.parametrize('tool, arguments, message', WRONG)
def test_a_wrong_argument_is_one_sentence(tool, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 0)
    with pytest.raises(SystemExit) as caught:
        tool.main(['--device', 'cpu', *arguments])
    last = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and re.search(message, last), last


@pytest.mark.parametrize('tool', TOOLS_AND_OPTIONS)
def test_threads_are_those_of_torch_unless_told_otherwise(tool):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert tool.parse_args(['--device', 'cpu']).threads == 3
    finally:
        torch.set_num_threads(before)


def test_an_earlier_run_without_rows_is_refused(tmp_path, capsys):
    settings = dict(layers=1, batch=1, dtype='float32')
    content = dict(environment=dict(settings=settings, device_name='a CPU'), rows=[])
    path = tmp_path / 'empty.json'
    path.write_text(json.dumps(content))
    with pytest.raises(SystemExit):
        benchmark_efficiency.main(['--device', 'cpu', '--replot', str(path)])
    assert 'empty.json: it has no rows' in capsys.readouterr().err


def test_help_names_mixers_and_defaults(capsys):
    with pytest.raises(SystemExit):
        benchmark_efficiency.main(['--help'])
    text = ' '.join(capsys.readouterr().out.split())
    assert 'aft-local-hard-WINDOW' in text and '--positions 64 256 1024 4096 --dims 256' in text


@pytest.mark.parametrize(
    'name',
    [
        *benchmark_efficiency.DEFAULTS['cuda']['mixers'],
        *('bound', 'dense-softmax', 'linear', 'performer', 'lsh-4', 'lsh-8'),
    ],
)
def test_every_named_mixer_makes_a_decoder(name):
    hidden = decoders.infer(decoders.build(name, 20, 16, 1, 2), decoders.random_tokens(2, 20))
    assert hidden.shape == (2, 20, 16) and hidden.isfinite().all()


def test_images_per_second(tmp_path, capsys):
    pytest.importorskip('timm')
    path = tmp_path / 'out.json'
    models = ['deit-tiny', 'aft-tiny-h32-k3', 'bound-tiny-h32-k3']
    sizes = ['--size', 32, '--batch', 2]
    text = run('benchmark_models.py', '--models', *models, *sizes, '--json', path)
    assert all(name in text for name in models)
    rows = {row['model']: row for row in json.loads(path.read_text())['rows']}
    for row in rows.values():
        assert row['form'] == 'eager' and row['peak_mib'] >= 0
        assert row['wall_images_per_second'] == row['images_per_second'] > 0
    assert {'speed_vs_deit', 'speed_vs_bound', 'profile'} <= set(rows['aft-tiny-h32-k3'])
    assert 'speed_vs_deit' not in rows['deit-tiny']
    plot_models.main([str(path), '--png', str(tmp_path / 'bars.png')])
    assert '| aft-tiny-h32-k3, 32, float32 | ' in capsys.readouterr().out
    assert matplotlib.image.imread(tmp_path / 'bars.png').std() > 0.1


@pytest.fixture
def compiled(monkeypatch):
    """Stands in the place of torch.compile, which takes half a minute: what it makes of a model."""
    made = []

    def install(make):
        def compile_(model, dynamic):
            assert dynamic is False
            made.append(model)
            return make(model)

        monkeypatch.setattr(torch, 'compile', compile_)
        monkeypatch.setattr(benchmark_models, 'in_fresh_process', lambda *args: 1.0)
        return made

    return install


def run_models(tmp_path, *models, size=32):
    path = tmp_path / 'out.json'
    forms = ['--forms', 'eager', 'compiled', '--batch', '1', '--json', str(path)]
    benchmark_models.main(['--models', *models, '--size', str(size), *forms, *COMMON])
    return {(row['model'], row['form']): row for row in json.loads(path.read_text())['rows']}


def test_compiled_models_are_held_against_compiled_ones(compiled, tmp_path):
    pytest.importorskip('timm')
    made = compiled(lambda model: lambda x: (time.sleep(0.2), model(x))[1])
    rows = run_models(tmp_path, 'deit-tiny', 'convnext_femto')
    assert len(made) == 2 and len(rows) == 4
    # Both wait: against each other they are as before, against eager they are slow.
    assert rows['convnext_femto', 'compiled']['speed_vs_eager'] < 0.5
    assert rows['convnext_femto', 'compiled']['speed_vs_deit'] > 0.5
    assert 'speed_vs_eager' not in rows['convnext_femto', 'eager']


def test_a_compiled_model_that_is_wrong_is_not_timed(compiled, tmp_path):
    compiled(lambda model: lambda x: tuple(1.01 * y for y in model(x)))
    rows = run_models(tmp_path, 'aft-tiny-h32-k3')
    assert rows['aft-tiny-h32-k3', 'eager']['images_per_second'] > 0
    wrong = rows['aft-tiny-h32-k3', 'compiled']
    assert wrong['reason'].startswith('compiled, it is wrong by 1.0')
    assert 'images_per_second' not in wrong


def test_a_rival_that_cannot_run_a_size_says_why(compiled, tmp_path):
    pytest.importorskip('timm')
    compiled(lambda model: model)
    # Four halvings leave nothing of 16 px.
    for row in run_models(tmp_path, 'convnext_femto', size=16).values():
        assert row['reason'].startswith('timm failed: ') and 'images_per_second' not in row


def test_what_does_not_fit_is_a_row_and_a_failure_of_ours_is_none(compiled, monkeypatch, tmp_path):
    compiled(lambda model: model)

    def too_large(*args):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(benchmark_models.ProjectionsOnly, '_mix', too_large)
        rows = run_models(tmp_path, 'bound-tiny-h32-k3')
    assert {row['reason'] for row in rows.values()} == {'out of memory'}
    monkeypatch.setattr(benchmark_models.ProjectionsOnly, '_mix', lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_models(tmp_path, 'bound-tiny-h32-k3')


def test_a_model_with_a_wrong_op_is_not_timed(monkeypatch):
    monkeypatch.setenv('AFT_MM_BACKEND', 'eager')
    monkeypatch.setattr(eager, 'aft_conv', doubled(eager.aft_conv))
    arguments = ['--models', 'aft-tiny-h32-k3', '--size', '32', '--batch', '1', *COMMON]
    with pytest.raises(SystemExit, match='aft-tiny-h32-k3 at 32 px .*: not timed'):
        benchmark_models.main(arguments)


def test_deit_without_timm_is_named(monkeypatch, capsys):
    monkeypatch.setattr(benchmark_models, 'missing', lambda package: f'pip install {package}')
    benchmark_models.main(['--models', 'deit-tiny', '--size', '32', *COMMON])
    assert 'not run: pip install timm' in capsys.readouterr().out


@pytest.mark.parametrize(
    'name',
    ['aft-tiny', 'deit-huge', 'aft-tiny-k3-h32', 'aft-tiny--k3', 'aft-tiny-hx-k3', 'resnet-50'],
)
def test_a_model_without_a_meaning_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        benchmark_models.parse_args(['--models', name])
    assert f"got '{name}'" in capsys.readouterr().err


@pytest.mark.parametrize('name', benchmark_models.DEFAULTS['cuda']['models'])
def test_models_of_table_7_have_their_sizes(name):
    if not name.startswith(('aft', 'bound')):
        pytest.importorskip('timm')
    with torch.device('meta'):
        model = benchmark_models.build(name, 224, 'float32', 'meta')
    kind, arch, *_ = benchmark_models.parse_name(name)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    # In millions, of the paper, less the head of 1,000 classes.
    paper = {
        'deit-tiny': 5.7, 'aft-tiny-h32-k11': 5.4, 'aft-tiny-h192-k11': 5.9, 'deit-small': 22.1,
        'aft-small-h16-k11': 20.3, 'aft-small-h384-k11': 22.5, 'aft-small-h384-k15': 23.0,
    }  # fmt: skip
    if name in paper:
        head = benchmark_models.CHANNELS[arch] * 1000 / 1e6
        assert parameters == pytest.approx(paper[name] - head, abs=0.1)


def test_a_training_step(tmp_path):
    path = tmp_path / 'out.json'
    text = run(
        'training_step.py', '--tokens', 40, '--dims', 16, '--layers', 1, '--window', 8,
        '--json', path)  # fmt: skip
    rows = {row['model']: row for row in json.loads(path.read_text())['rows']}
    assert set(rows) == {'aft-local-8', 'softmax', 'dense-aft-local-8', 'bound'}
    assert rows['aft-local-8']['time_over_local'] == 1 and text.count('x AFT-local') == 8


def test_mixed_precision_leaves_the_parameters_in_float32():
    """The factors of the position bias reach the op as AMP leaves them, its tokens rounded."""
    model = decoders.build('aft-local-8', 16, 16, 1)
    mixer = model.layers[0].token_mixer
    seen, local = [], mixer.op

    def op(query, key, value, pos_u, *others, **options):
        seen.append([x.dtype for x in (query, key, value, pos_u)])
        return local(query, key, value, pos_u, *others, **options)

    mixer.op = op
    training_step.amp_step('bfloat16', model, decoders.random_tokens(2, 16))
    assert seen == [[torch.bfloat16] * 3 + [torch.float32]]
