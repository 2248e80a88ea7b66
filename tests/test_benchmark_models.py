"""What the tools that time whole models check, write and draw."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch

from aft_mm.ops import eager

TOOLS = Path(__file__).parents[1] / 'tools' / 'benchmarks'
sys.path.insert(0, str(TOOLS))

import benchmark_efficiency  # noqa: E402
import benchmark_models  # noqa: E402
import decoders  # noqa: E402

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
    mixer = 'aft_mm.AFTWindow(window=3)'
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
    picture = matplotlib.image.imread(png)
    # Two rows of panels with something in them.
    assert picture.shape[0] > 700 and len({tuple(p) for p in picture[::3, ::3].reshape(-1, 4)}) > 20
    benchmark_efficiency.main(['--device', 'cpu', '--replot', str(path), '--png', str(again)])
    assert (matplotlib.image.imread(again) == picture).all()


def test_a_decoder_with_a_wrong_op_is_not_timed(monkeypatch, tmp_path):
    path = tmp_path / 'out.json'
    monkeypatch.setattr(eager, 'aft_window', doubled(eager.aft_window))
    with pytest.raises(SystemExit, match='aft-window-3.* is wrong by .*: not timed'):
        benchmark_efficiency.main(['--mixers', 'aft-window-3', *COMMON, '--json', str(path)])
    assert not path.exists()


def test_what_takes_too_long_is_left_out():
    args = argparse.Namespace(
        lengths=[8, 16, 32], mixers=['a', 'b'], patience=-1, rounds=1, device='cpu'
    )
    assert set(benchmark_efficiency.sweep(lambda *cell: lambda: None, args)) == set()
    args.patience = 100
    assert len(benchmark_efficiency.sweep(lambda *cell: lambda: None, args)) == 6

    def make(name, length):
        def call():
            if name == 'b' and length > 8:
                raise torch.OutOfMemoryError

        return call

    fitting = benchmark_efficiency.sweep(make, args)
    assert set(fitting) == {('a', 8), ('a', 16), ('a', 32), ('b', 8)}


@pytest.mark.parametrize('name, expected', [
    ('aft-local-normalized-5', dict(type='aft_mm.AFTLocalNormalized', rank=64, window=5)),
    ('aft_mm.AFTSimple', dict(type='aft_mm.AFTSimple')),
    ('aft_mm.AFTLocal(window=5, rank=None)', dict(type='aft_mm.AFTLocal', window=5, rank=None)),
])  # fmt: skip
def test_mixers_by_name(name, expected):
    assert decoders.mixer(name, heads=2) == expected


@pytest.mark.parametrize(
    'name', [*benchmark_efficiency.DEFAULTS['cuda']['mixers'], 'bound', 'dense-softmax']
)
def test_every_named_mixer_makes_a_decoder(name):
    hidden = decoders.infer(decoders.build(name, 20, 16, 1, 2), decoders.random_tokens(2, 20))
    assert hidden.shape == (2, 20, 16) and hidden.isfinite().all()


def test_images_per_second(tmp_path):
    pytest.importorskip('timm')
    path = tmp_path / 'out.json'
    models = ['deit-tiny', 'aft-tiny-h32-k3', 'bound-tiny-h32-k3']
    text = run(
        'benchmark_models.py', '--models', *models, '--size', 32, '--batch', 2, '--json', path
    )
    assert all(name in text for name in models)
    rows = {row['model']: row for row in json.loads(path.read_text())['rows']}
    assert all(row['images_per_second'] > 0 and row['peak_mib'] >= 0 for row in rows.values())
    assert {'speed_vs_deit', 'speed_vs_bound', 'profile'} <= set(rows['aft-tiny-h32-k3'])
    assert 'speed_vs_deit' not in rows['deit-tiny']


def test_a_model_with_a_wrong_op_is_not_timed(monkeypatch):
    monkeypatch.setattr(eager, 'aft_conv', doubled(eager.aft_conv))
    arguments = ['--models', 'aft-tiny-h32-k3', '--size', '32', '--batch', '1']
    with pytest.raises(SystemExit, match='aft-tiny-h32-k3 at 32 px .*: not timed'):
        benchmark_models.main([*arguments, *COMMON])


def test_deit_without_timm_is_named(monkeypatch, capsys):
    monkeypatch.setattr(benchmark_models, 'missing', lambda package: f'pip install {package}')
    benchmark_models.main(['--models', 'deit-tiny', '--size', '32', *COMMON])
    assert 'not run: pip install timm' in capsys.readouterr().out


@pytest.mark.parametrize('name', ['aft-tiny', 'deit-huge', 'aft-tiny-k3-h32', 'resnet-50'])
def test_a_model_without_a_meaning_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        benchmark_models.parse_args(['--models', name])
    assert f"got '{name}'" in capsys.readouterr().err


@pytest.mark.parametrize('name', benchmark_models.DEFAULTS['cuda']['models'])
def test_models_of_table_7_have_their_sizes(name):
    if name.startswith('deit'):
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
