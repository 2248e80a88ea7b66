"""The short training run of tools/benchmarks, and the data that it is given."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mmengine.registry import DATASETS, init_default_scope
from PIL import Image

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / 'tools' / 'benchmarks'
sys.path.insert(0, str(TOOLS))

import synthetic_data  # noqa: E402
import training_run  # noqa: E402

MINI = ROOT / 'configs/language_modeling/aft-simple-mini_1xb16-6e_enwik8-t256.py'


@pytest.fixture(scope='module')
def text_only(tmp_path_factory):
    """A folder with the text and no images."""
    folder = tmp_path_factory.mktemp('data')
    synthetic_data.write_text(folder / 'enwik8' / 'enwik8', 20_000)
    return folder


def test_the_images_are_an_imagenet(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic_data, 'SIZE', (20, 15))
    monkeypatch.setattr(synthetic_data, 'COARSE', (4, 3))
    synthetic_data.write_images(tmp_path / 'imagenet' / 'train', 1)
    init_default_scope('mmpretrain')
    data = DATASETS.build(dict(type='ImageNet', data_root=str(tmp_path / 'imagenet'), split='train',
                               pipeline=[dict(type='LoadImageFromFile')]))  # fmt: skip
    assert len(data) == 1000 and [data[i]['gt_label'] for i in (0, 999)] == [0, 999]
    assert data[7]['img'].shape == (15, 20, 3)


def test_a_picture_is_as_large_as_those_of_imagenet_and_has_the_colour_of_its_class(tmp_path):
    generator = np.random.default_rng(0)
    first, again, other = (synthetic_data.picture(n, generator) for n in (3, 3, 4))
    means = [np.asarray(image).mean((0, 1)) for image in (first, again, other)]
    assert abs(means[0] - means[1]).max() < 5 < abs(means[0] - means[2]).max()
    first.save(tmp_path / 'a.jpg', quality=synthetic_data.QUALITY)
    assert Image.open(tmp_path / 'a.jpg').size == (500, 375)
    # The mean of ImageNet's files is 110 kB.
    assert 50e3 < (tmp_path / 'a.jpg').stat().st_size < 200e3


def test_a_run_is_measured(run, text_only, tmp_path):
    done = run(
        TOOLS / 'training_run.py', MINI, '--iterations', 12, '--amp', '--json', 'out.json',
        '--work-dir', 'run', '--cfg-options', 'train_dataloader.batch_size=2',
        'model.decoder.grid=(32,)', 'train_dataloader.dataset.context_length=32',
        cwd=tmp_path, env=dict(AFT_MM_DATA=str(text_only)))  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / 'out.json').read_text())
    (row,) = content['rows']
    assert row['config'] == MINI.stem and row['batch'] == 2 and row['iterations'] == 12
    assert 0 <= row['data_milliseconds'] < row['milliseconds'] and row['amp'] is True
    assert row['samples_per_second'] == pytest.approx(2e3 / row['milliseconds'])
    # Bytes of text, from about 8 bits each on.
    assert 1 < row['last_loss'] < row['first_loss'] < 8
    assert done.stdout.splitlines()[-1].startswith(f'{MINI.stem}: ')
    # Nothing but logs is left, and no path of the machine.
    assert not list((tmp_path / 'run').rglob('*.pth'))
    assert str(tmp_path) not in (tmp_path / 'out.json').read_text()


def test_missing_data_has_a_one_line_message(run, tmp_path):
    done = run(TOOLS / 'training_run.py', MINI, cwd=tmp_path, env=dict(AFT_MM_DATA='nowhere'))
    assert done.returncode == 1 and 'Traceback' not in done.stderr
    assert 'nowhere' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize('loss, status', [(2.0, 0), (float('nan'), 1)])
def test_a_loss_that_is_not_finite_ends_with_1(loss, status, text_only, tmp_path, monkeypatch):
    runner = SimpleNamespace(
        train=lambda: None,
        train_dataloader=SimpleNamespace(batch_size=2),
        message_hub=SimpleNamespace(
            get_scalar=lambda name: SimpleNamespace(data=(np.full(10, loss), None))
        ),
    )
    monkeypatch.setenv('AFT_MM_DATA', str(text_only))
    monkeypatch.setattr(training_run.RUNNERS, 'build', lambda config: runner)
    assert training_run.main([str(MINI), '--work-dir', str(tmp_path)]) == status
