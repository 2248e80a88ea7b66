"""`aft_mm predict` of folders with links, files and folders that cannot be read, and its five best classes."""

import csv
import json
import os

import numpy as np
import pytest
from PIL import Image

from aft_mm.apis import ImageClassifier
from aft_mm.checks import counted
from aft_mm.cli.main import main
from aft_mm.errors import UserError
from aft_mm.images import find_images, list_images

from ..errors import stops


@pytest.fixture
def photos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name in ('photos/a.png', 'photos/in/b.png'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 12, 3), dtype=np.uint8)).save(tmp_path / name)
    return tmp_path / 'photos'


def missing(folder):
    (folder / 'x.png').symlink_to('nothing.png')


def itself(folder):
    (folder / 'x.png').symlink_to('x.png')


def zero_bytes(folder):
    (folder / 'x.png').touch()


def pipe(folder):
    os.mkfifo(folder / 'x.png')


def forbidden(folder):
    (folder / 'x.png').write_bytes((folder / 'a.png').read_bytes())
    (folder / 'x.png').chmod(0)
    if os.access(folder / 'x.png', os.R_OK):
        pytest.skip('this user may read every file')


@pytest.mark.parametrize(
    ('write', 'reason'),
    [
        (missing, 'it is a link to a missing file'),
        (itself, 'Too many levels of symbolic links'),
        (zero_bytes, 'is empty'),
        (pipe, 'it is not a regular file'),
        (forbidden, 'Permission denied'),
    ],
)
def test_one_bad_file_does_not_refuse_a_folder(write, reason, photos, tiny_classifier, capsys):
    write(photos)
    words = ['predict', *tiny_classifier, 'photos', '--out', 'out', '--device', 'cpu']
    stops(rf"1 of 3 images have no result: image 'photos/x.png' .*{reason}", main, words)
    assert capsys.readouterr().out.startswith('2 images: out/')
    written = {one['path']: one for one in json.load(open('out/predictions.json'))}
    assert len(written) == 3 and reason in written['photos/x.png']['error']
    assert all(written[f'photos/{name}']['found'] for name in ('a.png', 'in/b.png'))


def test_links_to_folders_around_them_are_passed_over(photos, tiny_classifier, capsys):
    (photos / 'again').symlink_to('.')
    (photos.parent / 'other').mkdir()
    (photos / 'there').symlink_to('../other')
    (photos.parent / 'other/back').symlink_to('../photos')
    with pytest.raises(UserError, match="folder '.*again' is a link to a folder that contains it"):
        list_images(photos)
    unread = {}
    images, _ = find_images(photos, unread)
    assert images == ['a.png', 'in/b.png'] and len(unread) == 2
    main(['predict', *tiny_classifier, 'photos', '--out', 'out', '--device', 'cpu'])
    shown = capsys.readouterr().out
    assert shown.startswith('2 images: out/') and '\n2 folders not read, first folder ' in shown


def test_pictures_that_are_not_read_are_results_without_one(photos, tiny_classifier, capsys):
    (photos / 'c.heic').write_bytes(b'\x00\x00\x00\x18ftypheic' + bytes(20))
    (photos / 'd.cr2').write_bytes(b'II*\x00' + bytes(20))
    words = ['predict', *tiny_classifier, 'photos', '--out', 'out', '--device', 'cpu']
    message = "1 of 3 images have no result: image 'photos/c.heic' cannot be read: it is HEIC; "
    stops(message, main, words)
    shown = capsys.readouterr().out
    assert shown.startswith('2 images: out/')
    assert "1 file was not read: camera RAW (1), first 'photos/d.cr2'" in shown  # as next to a JPEG
    written = {one['path']: one for one in json.load(open('out/predictions.json'))}
    assert len(written) == 3 and 'it is HEIC' in written['photos/c.heic']['error']


def test_a_folder_with_the_name_of_an_image_is_a_folder(photos, tiny_classifier, capsys):
    (photos / 'in').rename(photos / 'x.jpg')
    main(['predict', *tiny_classifier, 'photos', '--out', 'out', '--device', 'cpu'])
    assert capsys.readouterr().out.startswith('2 images: out/')


def test_a_folder_that_cannot_be_listed_is_named(photos, monkeypatch):
    scan = os.scandir

    def refuse(path):
        if str(path).endswith('/in'):
            raise PermissionError(13, 'Permission denied', str(path))
        return scan(path)

    monkeypatch.setattr(os, 'scandir', refuse)
    unread = {}
    assert find_images(photos, unread)[0] == ['a.png']
    assert [*unread.values()] == [f"folder '{photos}/in' cannot be read: Permission denied"]
    with pytest.raises(UserError, match="/in' cannot be read: Permission denied"):
        list_images(photos)


def test_the_five_best_classes_are_written_by_name(photos, tiny_classifier):
    main(['predict', *tiny_classifier, 'photos/a.png', '--out', 'out', '--device', 'cpu'])
    (result,) = ImageClassifier(*tiny_classifier, 'cpu')(['photos/a.png'], progress=False)
    (one,) = json.load(open('out/predictions.json'))
    with open('out/predictions.csv', newline='') as file:
        (line,) = csv.DictReader(file)  # of the best one
    order = np.argsort(-result['scores'])[:5].tolist()
    assert [found['label'] for found in one['found']] == order
    assert [*one['found'][0]] == ['class_name', 'label', 'score']
    assert [*line] == ['path', 'class_name', 'label', 'score']
    assert line['class_name'] == one['found'][0]['class_name'] and int(line['label']) == order[0]
    names = 'ant bee cat dog elk'.split()
    assert [found['class_name'] for found in one['found']] == [names[label] for label in order]
    assert line['score'] == f'{one["found"][0]["score"]:.6g}'
    for found in one['found']:
        assert found['score'] == pytest.approx(result['scores'][found['label']], rel=1e-4)


def test_numbers_have_their_noun():
    assert counted(1, 'box') == '1 box' and counted(0, 'image') == '0 images'
    assert counted(1000, 'box') == '1,000 boxes' and counted(2, 'class') == '2 classes'
