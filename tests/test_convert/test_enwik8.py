"""``aft_mm convert enwik8``: archive to data file."""

import gzip
import zipfile

import numpy as np
import pytest

from aft_mm.datasets import TextFile

from ..errors import stops
from ..helpers import command

SIZE = 3001
enwik8 = command('convert enwik8')


@pytest.fixture
def content():
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8).tobytes()


@pytest.fixture(params=['zip', 'gz'])
def archive(request, tmp_path, content):
    path = tmp_path / f'enwik8.{request.param}'
    if request.param == 'gz':
        path.write_bytes(gzip.compress(content))
    else:
        with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as file:
            file.writestr('enwik8', content)
    return path


def test_the_file_is_unpacked_for_the_dataset(archive, tmp_path, content, capsys):
    folder = tmp_path / 'data/enwik8'
    enwik8([str(archive), str(folder), '--size', str(SIZE)])
    assert capsys.readouterr().out == f'written to {folder / "enwik8"}\n'
    assert (folder / 'enwik8').read_bytes() == content
    assert len(TextFile(str(folder / 'enwik8'), 'test', 150).data) == 150
    assert [path.name for path in folder.iterdir()] == ['enwik8']


def fails(match, archive, *words):
    folder = archive.parent / 'data'
    stops(match, enwik8, [str(archive), str(folder), *words])
    assert not folder.exists() or not list(folder.iterdir())


def test_damaged_archives_and_another_size_are_refused(archive):
    found = rf"'{archive}' holds 3,001; .* --size 3001"
    fails(f'enwik8 must have 100,000,000 bytes, but {found}', archive)
    data = archive.read_bytes()
    for damaged in (data[:-100], data[:100] + bytes(100) + data[200:], b''):
        archive.write_bytes(damaged)
        fails('(is damaged or holds no enwik8|holds 0;)', archive, '--size', str(SIZE))


def test_other_files_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / 'a.zip', 'w') as file:
        file.writestr('enwik9', 'text')
    fails('holds no enwik8', tmp_path / 'a.zip')
    fails("no.zip' does not exist", tmp_path / 'no.zip')
    (tmp_path / 'enwik8.7z').touch()
    fails('must be a .zip or a .gz file', tmp_path / 'enwik8.7z')
