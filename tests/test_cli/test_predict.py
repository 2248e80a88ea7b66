"""`aft_mm predict`: files of the results, inputs, and bad input."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
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


@pytest.mark.parametrize('rule', ['thr', 'topk'])
def test_all_accepted_labels_are_written(
    rule, images, tiny_classifier, multi_label, monkeypatch, capsys
):
    """Of a classifier with the same weights, by its logits; an image without a label has a row."""
    monkeypatch.setattr('aft_mm.apis.images.MOST_CLASSES', 2)
    texts, add_text = [], Axes.text
    monkeypatch.setattr(
        Axes, 'text', lambda *args, **style: [texts.append(args[3]), add_text(*args, **style)][1]
    )
    (images / 'in/a/two\nlines.png').rename(images / 'in/a/two.png')
    classify = ImageClassifier(*tiny_classifier, 'cpu')
    paths = sorted(map(str, Path('in').rglob('*.*')))
    inputs = [classify.preprocess(path)['inputs'] for path in paths]
    batch = classify.model.data_preprocessor(dict(inputs=inputs), False)['inputs']
    classify.model.head.fc.bias -= classify.model(batch).mean(
        0
    )  # for labels that are about equally frequent
    weights = dict(torch.load(tiny_classifier[1]), state_dict=classify.model.state_dict())
    torch.save(weights, 'balanced.pth')
    scores = classify.model(batch).sigmoid()
    best = scores.amax(1).sort().values
    value = 3 if rule == 'topk' else float(best[:2].mean())
    files = multi_label(tiny_classifier[0], 'balanced.pth', **{rule: value})
    main(['predict', *files, 'in', '--out', 'out', '--device', 'cpu'])
    written, lines = read(images / 'out')
    accepted = scores >= (value if rule == 'thr' else scores.topk(3).values[:, -1:])
    rows, entries, shown = [], [], []
    for path, row, chosen in zip(paths, scores, accepted, strict=True):
        order = row.argsort(descending=True).tolist()
        labels = [label for label in order if chosen[label]]
        names = [classify.classes[label] for label in labels]
        rows += [(path, classify.classes[label], str(label)) for label in labels]
        rows += [] if labels else [(path, 'no label', '')]
        entries.append((path, [(x, x in labels) for x in order[: max(2, len(labels))]]))
        shown.append([f'{a} {row[b]:.2f}' for a, b in zip(names, labels, strict=True)])
    assert [tuple(line.values())[:3] for line in lines] == rows
    for line in lines:
        expected = float(scores[paths.index(line['path']), int(line['label'] or 0)])
        assert line['score'] == '' or float(line['score']) == pytest.approx(expected, rel=1e-4)
    found = [(one['path'], [(x['label'], x['accepted']) for x in one['found']]) for one in written]
    assert found == entries
    assert texts == ['\n'.join(text) or 'no label' for text in shown]
    empty = sum(not chosen.any() for chosen in accepted)
    assert accepted.sum() > 4 and empty == (rule == 'thr')
    how = (
        ', the best 3 of each image' if rule == 'topk' else f' with a score of at least {value:.4g}'
    )
    summary = (
        f'{accepted.sum()} labels{how} (model.head.{rule}), {empty} of 4 images without a label'
    )
    assert summary in capsys.readouterr().out
    for result, (path, entry) in zip(
        ImageClassifier(*files, 'cpu')(paths, progress=False), entries, strict=True
    ):
        labels = [label for label, is_accepted in entry if is_accepted]
        names = [classify.classes[label] for label in labels]
        assert (result['path'], result['labels'], result['class_names']) == (path, labels, names)
        assert 'label' not in result and result['scores'].shape == (5,)


def test_many_labels_fit_into_the_picture(tiny_classifier, multi_label):
    classify = ImageClassifier(*multi_label(*tiny_classifier), 'cpu')
    image = np.full((224, 224, 3), 255, np.uint8)
    drawn = classify.draw(image, dict(labels=[0, 1] * 20, scores=torch.ones(5).numpy()))
    changed = (drawn != 255).any((1, 2)).nonzero()[0]
    assert 200 < changed.max() < 223


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
