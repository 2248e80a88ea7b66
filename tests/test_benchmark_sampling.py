"""What the tool that times the drawing of images checks, estimates and writes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

TOOLS = Path(__file__).parents[1] / 'tools' / 'benchmarks'
sys.path.insert(0, str(TOOLS))

import benchmark_sampling  # noqa: E402

from aft_mm.models import AutoregressiveModel  # noqa: E402

ARGUMENTS = ['--device', 'cpu', '--threads', '1', '--rounds', '1', '--images', '1']


@pytest.fixture
def tiny(monkeypatch):
    """Models of 120 tokens in the place of the paper's."""
    mixers = {
        'aft-simple': dict(type='aft_mm.AFTSimple'),
        'softmax': dict(type='aft_mm.SoftmaxAttention', num_heads=2),
    }

    def build(data, mixer, device):
        torch.manual_seed(0)
        decoder = dict(
            type='aft_mm.SequenceDecoder',
            embed_dims=8,
            num_layers=1,
            embedding=dict(type='aft_mm.TokenEmbedding', vocab_size=256),
            token_mixer=mixers[mixer],
            grid=(120,),
        )
        head = dict(type='aft_mm.LogisticMixtureHead', embed_dims=8, num_channels=1)
        return AutoregressiveModel(decoder, head).eval()

    monkeypatch.setattr(benchmark_sampling, 'build', build)
    return list(mixers)


def test_images_are_drawn_estimated_and_written(tiny, tmp_path, capsys):
    path, png = tmp_path / 'out.json', tmp_path / 'out.png'
    options = ['--mixers', *tiny, '--batch', '2', '--json', str(path), '--png', str(png)]
    benchmark_sampling.main([*ARGUMENTS, *options])
    printed = capsys.readouterr().out
    rows = {(row['mixer'], row['form']): row for row in json.loads(path.read_text())['rows']}
    assert set(rows) == {(mixer, form) for mixer in tiny for form in ('steps', 'anew')}
    for (mixer, form), row in rows.items():
        assert row['tokens'] == 120 and len(row['token_ms']) == len(row['positions']) == 5
        assert row['config'] == benchmark_sampling.CONFIGS['mnist'][mixer]
        # All tokens anew are estimated, and said to be.
        assert (row['seconds'] is None) == (form == 'anew') == ('step_ms' not in row)
    whole = rows['aft-simple', 'steps']
    assert 0.2 < whole['seconds'] / whole['estimated_seconds'] < 5
    assert printed.count(' s* ') == 2 and png.stat().st_size > 5000
    again = tmp_path / 'again.png'
    benchmark_sampling.main([*ARGUMENTS, '--replot', str(path), '--png', str(again)])
    assert capsys.readouterr().out == printed and again.stat().st_size > 5000


def test_the_estimate_is_exact_for_a_parabola(tiny):
    args = benchmark_sampling.parse_args([*ARGUMENTS, '--batch', '6'])
    model = benchmark_sampling.build('mnist', 'softmax', 'cpu')
    cost = np.poly1d([2e-4, 3e-3, 0.5])
    times = {('softmax', 'anew', p): cost(p) for p in (1, 30, 60, 90, 119)}
    row = benchmark_sampling.row_of(('softmax', 'anew'), model, times, 0.0, args)
    # Measured with 4 images, asked for 6.
    assert row['estimated_seconds'] == pytest.approx(1.5 * cost(np.arange(120)).sum())
    assert row['paper'] == (72.6, 0.45)


def test_steps_that_are_wrong_are_not_timed(tiny, monkeypatch, tmp_path):
    from aft_mm.models import SequenceDecoder

    step = SequenceDecoder.step

    def wrong(self, token, state):
        hidden, state = step(self, token, state)
        return hidden * 1.01, state

    monkeypatch.setattr(SequenceDecoder, 'step', wrong)
    with pytest.raises(SystemExit, match='aft-simple by steps is wrong by .* not timed'):
        path = str(tmp_path / 'out.json')
        benchmark_sampling.main([*ARGUMENTS, '--mixers', 'aft-simple', '--json', path])
    assert not list(tmp_path.iterdir())


def test_a_compiled_form_is_for_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    with pytest.raises(SystemExit):
        benchmark_sampling.parse_args(['--device', 'cuda', '--forms', 'compiled'])
    assert 'compiled is for --device cpu' in capsys.readouterr().err


@pytest.mark.parametrize('data', list(benchmark_sampling.CONFIGS))
def test_the_models_are_those_of_the_paper(data):
    layers, tokens = dict(mnist=(8, 784), cifar10=(16, 3072))[data]
    for name in benchmark_sampling.CONFIGS[data].values():
        path = TOOLS.parents[1] / 'configs' / 'image_ar' / f'{name}.py'
        decoder = benchmark_sampling.Config.fromfile(path).model.decoder
        assert (decoder.num_layers, decoder.embed_dims) == (layers, 256)
        assert decoder.grid == (tokens,)
