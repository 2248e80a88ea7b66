"""The trained models of aft_mm_minis: weights, cards, commands without training, and bad files."""

import hashlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import torch
from PIL import Image

from aft_mm.apis import get_model, list_models
from aft_mm.checkpoint import load_from_local, loading, read_safetensors
from aft_mm.config.finding import configs_by_name, find_config, own_weights, trained_models
from aft_mm.config.reading import check_data, read_config
from aft_mm.convert.data_licenses import DATA_SETS, NON_COMMERCIAL, weights_license
from aft_mm.datasets import Digits
from aft_mm.errors import UserError

from .errors import refuses_input, stops
from .helpers import ROOT, command, load_script, nightly, picture

pytestmark = pytest.mark.slow

make = load_script('minis/make')
ENTRIES = {entry['name']: entry for entry in json.loads(make.INDEX.read_text())}
NAMES = sorted(ENTRIES)
sample, transcribe, predict = command('sample'), command('transcribe'), command('predict')


def data_or_skip(name):
    """Skip a test whose data set or libraries are missing, with the reason."""
    if ENTRIES[name]['config'].endswith(('fsdd', 'yesno')):
        pytest.importorskip('jiwer', reason='error rates need jiwer')
        pytest.importorskip('soundfile', reason='sound files need soundfile')
    config = read_config(ENTRIES[name]['config'])
    try:
        check_data(config, 'test')
    except UserError as error:
        pytest.skip(str(error))
    return config


def test_every_model_is_listed_with_its_hash_and_card():
    assert {name: tuple(model) for name, model in trained_models().items()} == {
        name: (entry['config'], f'mini://{entry["file"]}#sha256={entry["sha256"]}')
        for name, entry in ENTRIES.items()
    }
    assert sum(path.stat().st_size for path in make.FOLDER.iterdir() if path.is_file()) <= 8e6
    assert {path.stem for path in make.FOLDER.glob('*.safetensors')} == set(NAMES)
    page = (ROOT / 'docs/minis.md').read_text()
    assert make.table(list(ENTRIES.values())) in page
    for name, entry in ENTRIES.items():
        path = make.FOLDER / entry['file']
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry['sha256']
        assert (make.FOLDER / f'{name}.md').read_text() == make.card(entry)
        low, high = entry['interval']
        assert low <= entry['value'] <= high and low < high


@pytest.mark.parametrize('name', NAMES)
def test_the_weights_are_float16_of_data_that_allow_it(name):
    loaded = read_safetensors(str(make.FOLDER / ENTRIES[name]['file']))
    types = {tensor.dtype for tensor in loaded['state_dict'].values()}
    assert torch.float16 in types and not types & {torch.float32, torch.bfloat16, torch.float64}
    config = loaded['meta']['cfg']
    assert weights_license(config) == ENTRIES[name]['license'] != NON_COMMERCIAL
    assert ENTRIES[name]['license'] in (ROOT / 'minis/pyproject.toml').read_text()
    # Neither a path of the machine nor a start from other weights.
    assert not re.search(r"'/\w+/", config) and str(Path.home()) not in config


@pytest.mark.parametrize('name', nightly(NAMES, ['mnist', 'spoken-digits']))
def test_the_metric_of_a_card_is_measured_again(name):
    data_or_skip(name)
    entry, about = ENTRIES[name], make.MODELS[name]
    metrics = make.evaluate(entry['config'], trained_models()[name].weights, about.subset)
    value = make.value_of(metrics, entry['metric'], slice(about.subset))
    expected = entry['value'] if about.subset is None else entry['subset']
    # One picture or word of the test set, or the rounding of another processor.
    assert value == pytest.approx(expected, abs=100 / entry['num'] if about.unit else 1e-3)


@pytest.mark.parametrize('name', NAMES)
def test_a_model_by_its_short_name_or_its_config(name):
    stored = load_from_local(str(make.FOLDER / ENTRIES[name]['file']))['state_dict']
    for given in (name, ENTRIES[name]['config']):
        model = get_model(given, pretrained=True, device='cpu')
        for key, value in model.state_dict().items():
            assert torch.equal(value, stored[key].to(value.dtype)), key
    start = get_model(name, device='cpu').state_dict()
    assert any(not torch.equal(start[key], stored[key].to(start[key].dtype)) for key in start)
    assert find_config(name) == str(configs_by_name()[ENTRIES[name]['config']])


def test_images_and_text_are_sampled_without_training(tmp_path):
    sample(['mnist', '--out', tmp_path / 'a.png', '--device', 'cpu', '--num', 4])
    # Mostly paper, with strokes of ink.
    assert 0.02 < (picture(tmp_path / 'a.png') > 128).mean() < 0.4
    sample(['enwik8', '--out', tmp_path / 'a.txt', '--prompt', 'The ', '--num-chars', 40])
    text = (tmp_path / 'a.txt').read_text()
    assert text.startswith('The ') and 0.1 < text.count(' ') / len(text) < 0.3


def test_a_digit_is_predicted_without_training(tmp_path):
    digits = [Digits('test')[index] for index in range(3)]
    files = [tmp_path / f'{index}.png' for index in range(3)]
    for digit, file in zip(digits, files, strict=True):
        pixels = digit['img'][..., 0].repeat(4, 0).repeat(4, 1)
        Image.fromarray(pixels).save(file)
    # The first file is no checkpoint; a checkpoint may still be given.
    for words in ([], [make.FOLDER / 'digits.safetensors']):
        out = tmp_path / f'out{len(words)}'
        predict(['digits', *words, *files, '--out', out, '--device', 'cpu'])
        lines = (out / 'predictions.csv').read_text().splitlines()[1:]
        found = [(line.split(',')[0], line.split(',')[1]) for line in lines]
        expected = [
            (str(file), str(digit['gt_label'])) for file, digit in zip(files, digits, strict=True)
        ]
        assert found == expected


@pytest.mark.parametrize('name', ['spoken-digits', 'yesno'])
def test_speech_is_transcribed_without_training(name, capsys):
    config = data_or_skip(name)
    folder = Path(config.test_dataloader.dataset.data_root)
    if name == 'yesno':
        text = dict(line.split(' ', 1) for line in (folder / 'text').read_text().splitlines())
        key = '1_1_0_0_1_1_1_0'
        cases = [(folder / f'waves_yesno/{key}.wav', text[key])]
    else:
        recordings = folder / 'recordings'
        words = config.units.symbols
        cases = [(recordings / f'{n}_jackson_0.wav', words[n]) for n in range(10)]
    transcribe([name, *(file for file, _ in cases)])
    lines = capsys.readouterr().out.splitlines()
    right = [line == f'{file}\t{text}' for line, (file, text) in zip(lines, cases, strict=True)]
    assert sum(right) >= 0.9 * len(cases)


def test_the_list_marks_the_models(capsys):
    command('list')(['mnist'])
    (header, *rows) = capsys.readouterr().out.splitlines()
    start = header.index('trained')
    marked = {row.split()[0]: row[start:].split()[0] for row in rows if row[start] != ' '}
    assert marked == {ENTRIES['mnist']['config']: 'mnist'} and len(rows) > 10


def test_weights_are_those_of_the_config_that_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, model in trained_models().items():
        folder = Path(find_config(model.config)).parent.name
        for given in (name, model.config, f'{folder}/{model.config}'):
            assert own_weights(given) == model.weights
    assert own_weights('aft-conv-quick') == trained_models()['digits'].weights  # a part of its name
    Path('digits').write_text('')
    assert own_weights('digits') is None


def test_a_model_without_weights_is_no_random_start(tmp_path):
    names = ', '.join(trained_models())
    other = 'aft-simple-mini_1xb16-2e_mnist'
    assert other in list_models() and own_weights(other) is None
    message = f'CHECKPOINT must be given, since no weights come with .*, only with {names}$'
    stops(message, sample, [other, '--out', tmp_path / 'a.png'])
    (tmp_path / 'mine.py').write_text(f"_base_ = '{find_config(other)}'\n")
    stops(message, sample, [tmp_path / 'mine.py', '--out', tmp_path / 'a.png'])
    refuses_input('has no released weights; models with weights: ', get_model, other, True)
    stops("config 'mnits' does not exist", sample, ['mnits', '--out', tmp_path / 'a.png'])
    refuses_input("config 'mnits' does not exist", get_model, 'mnits', True)
    assert not (tmp_path / 'a.png').exists()


def test_damaged_and_missing_weights_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, '_minis_folder', lambda: tmp_path)
    words = ['mnist', '--out', tmp_path / 'a.png']
    stops("checkpoint 'mnist.safetensors' is not in ", sample, words)
    data = bytearray((make.FOLDER / 'mnist.safetensors').read_bytes())
    data[-9] ^= 1
    for content in (
        data,
        data[: len(data) // 2],
        b'',
        (make.FOLDER / 'yesno.safetensors').read_bytes(),
    ):
        (tmp_path / 'mnist.safetensors').write_bytes(content)
        stops('is refused: its sha256 begins with ', sample, words)
        refuses_input('is refused: its sha256 begins with ', get_model, 'mnist', True)
    for address in ('mini://mnist.safetensors', f'mini://../a#sha256={"0" * 64}'):
        refuses_input('must be mini://FILE#sha256=', loading.load_from_minis, address)
    assert not (tmp_path / 'a.png').exists()


def test_the_package_of_weights_may_be_missing_or_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, '__file__', str(tmp_path / 'aft_mm/checkpoint/loading.py'))
    assert importlib.util.find_spec('aft_mm_minis') is None
    stops('aft_mm_minis, which is not installed', sample, ['mnist', '--out', tmp_path / 'a.png'])
    monkeypatch.syspath_prepend(ROOT / 'minis')
    assert loading._minis_folder() == make.FOLDER


def test_the_second_wheel_has_weights_and_cards(tmp_path):
    words = '-m pip wheel -q --no-deps --no-index --no-build-isolation -w'.split()
    copy = tmp_path / 'minis'
    for path in [*make.FOLDER.iterdir(), *(ROOT / 'minis').glob('*.toml'), ROOT / 'minis/LICENSE']:
        if path.is_file():
            target = copy / path.relative_to(ROOT / 'minis')
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    subprocess.run([sys.executable, *words, tmp_path, copy], check=True, capture_output=True)
    (wheel,) = tmp_path.glob('aft_mm_minis-*-py3-none-any.whl')
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if '.dist-info/' not in name}
        (metadata,) = [name for name in file.namelist() if name.endswith('/METADATA')]
        about = message_from_string(file.read(metadata).decode())
    suffixes = ('.safetensors', '.md', '.json', '.py')
    assert names == {
        f'aft_mm_minis/{path.name}' for path in make.FOLDER.iterdir() if path.suffix in suffixes
    }
    licenses = {entry['license'] for entry in ENTRIES.values()}
    assert set(about['License-Expression'].split(' AND ')) == licenses
    terms = {data.weights for data in DATA_SETS.values() if data.samples}
    assert licenses <= terms
