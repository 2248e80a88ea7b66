"""`aft_mm predict`: files of the results, inputs, and bad input."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from aft_mm.apis import ImageClassifier
from aft_mm.cli.main import main

from ..errors import stops


@pytest.fixture
def images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    names = ('in/b/2.png', 'in/a/1, é.jpg', 'in/a/two\nlines.png', 'in/c.png', 'other/d.png')
    for number, name in enumerate(names):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        size = (8 + 3 * (number % 2), 12, 3)
        Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(tmp_path / name)
    return tmp_path


def read(folder):
    with open(folder / 'predictions.csv', newline='', encoding='utf-8') as file:
        return json.loads((folder / 'predictions.json').read_text()), list(csv.DictReader(file))


def test_classes_are_those_of_the_classifier(images, tiny_classifier, capsys):
    (images / 'in/a/two\nlines.png').rename(images / 'in/a/two.png')
    words = [*tiny_classifier, 'in', 'o*/**/*.png', 'in/c.png', '--device', 'cpu']
    main(['predict', *words, '--out', 'out', '--batch-size', '2'])
    captured = capsys.readouterr()
    assert '100%' in captured.err and captured.out.startswith('5 images: out/predictions.csv')
    written, lines = read(images / 'out')
    paths = ['in/a/1, é.jpg', 'in/a/two.png', 'in/b/2.png', 'in/c.png', 'other/d.png']
    assert [one['path'] for one in written] == paths
    assert [line['path'] for line in lines] == paths
    results = ImageClassifier(*tiny_classifier, 'cpu')(paths, progress=False)
    for one, line, expected in zip(written, lines, results, strict=True):
        found = one['found'][0]
        assert found['label'] == expected['label'] == int(line['label'])
        assert found['class_name'] == expected['class_name'] == line['class_name']
        assert found['score'] == pytest.approx(expected['score'], rel=1e-4)
        assert line['score'] == f'{found["score"]:.6g}'
        assert [*line] == ['path', 'class_name', 'label', 'score']
        assert Image.open(images / 'out' / one['picture']).size[0] >= 224
    assert len({one['picture'] for one in written}) == 5

    main(['predict', *tiny_classifier, 'in/c.png', '--out', 'one', '--device', 'cpu'])
    assert capsys.readouterr().out.startswith('1 image: one/')
    main(['predict', *words, '--out', 'numbers', '--no-pictures'])
    assert not (images / 'numbers/pictures').exists()
    assert read(images / 'numbers')[1][0]['label'] == lines[0]['label']
    Path('file').touch()
    stops("--out must be a folder, got the file 'file'", main, ['predict', *words, '--out', 'file'])
    stops("--out 'out' holds predictions already", main, ['predict', *words, '--out', 'out'])


def test_pictures_of_the_user_are_kept(images, tiny_classifier):
    (images / 'in').rename(images / 'pictures')
    words = ['predict', *tiny_classifier, 'pictures/c.png', '--out']
    stops("--out '.' must have no files in pictures/; name another", main, [*words, '.'])
    main([*words, 'pictures'])
    main([*words, '.', '--no-pictures'])  # a classifier has no masks
    (images / 'out').mkdir()
    (images / 'out/pictures').touch()
    stops("--out 'out' must have no files in pictures/; name another", main, [*words, 'out'])


def test_narrow_images_have_pictures_of_a_bounded_size(images, tiny_classifier):
    Image.new('RGB', (3000, 2)).save(images / 'narrow.png')
    main(['predict', *tiny_classifier, 'narrow.png', '--out', 'out', '--device', 'cpu'])
    (picture,) = (images / 'out/pictures').iterdir()
    assert max(Image.open(picture).size) <= 4096


@pytest.mark.parametrize(
    ('inputs', 'message'),
    [
        (['nothing.jpg'], "PATH 'nothing.jpg' does not exist"),
        (['in/*.jpg'], 'got no file'),
        (['empty'], "PATH 'empty' must hold images"),
        (['cut.png'], "image 'cut.png' is truncated"),
        (['notes.txt', 'cut.png'], "image 'notes.txt' is .*not an image"),
        ([os.fsdecode(b'\xff.png')], 'udcff.png. must have a name in UTF-8'),
        (['in'], r"two\\nlines.png' must have a name without a line break"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(inputs, message, images, tiny_classifier):
    (images / 'empty').mkdir()
    (images / 'notes.txt').write_text('a')
    for path in inputs:
        if path.startswith('\udcff'):
            (images / path).write_bytes((images / 'in/c.png').read_bytes())
    (images / 'cut.png').write_bytes((images / 'in/c.png').read_bytes()[:-100])
    stops(message, main, ['predict', *tiny_classifier, *inputs, '--out', 'out'])
    assert not (images / 'out').exists()


def test_a_classifier_has_no_least_score(images, tiny_classifier):
    words = ['predict', *tiny_classifier, 'in/b', '--out', 'out', '--score', '0.3']
    stops('--score has no effect on the model of .*, without boxes', main, words)


def test_another_task_names_its_command(images, untrained):
    for name, command in (('tiny_text', 'sample'), ('tiny_super_resolution', 'super-resolve')):
        words = ['predict', *untrained[name], 'in/b', '--out', 'out']
        stops(f'for this one use `aft_mm {command}`', main, words)
