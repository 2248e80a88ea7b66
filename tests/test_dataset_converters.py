"""tools/dataset_converters/enwik8.py: archive to data file."""

import gzip
import importlib.util
import zipfile
from pathlib import Path

import numpy as np
import pytest

from aft_mm.datasets import TextFile

SIZE = 3001


@pytest.fixture
def enwik8():
    path = Path(__file__).parents[1] / 'tools/dataset_converters/enwik8.py'
    spec = importlib.util.spec_from_file_location('enwik8_converter', path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def test_the_file_is_unpacked_for_the_dataset(enwik8, archive, tmp_path, content, capsys):
    folder = tmp_path / 'data/enwik8'
    enwik8.main([str(archive), str(folder), '--size', str(SIZE)])
    assert capsys.readouterr().out == f'written to {folder / "enwik8"}\n'
    assert (folder / 'enwik8').read_bytes() == content
    assert len(TextFile(str(folder / 'enwik8'), 'test', 150).data) == 150
    assert [path.name for path in folder.iterdir()] == ['enwik8']


def fails(enwik8, archive, folder, match, *words):
    with pytest.raises(SystemExit, match=match) as error:
        enwik8.main([str(archive), str(folder), *words])
    assert '\n' not in str(error.value)
    assert not folder.exists() or not list(folder.iterdir())


def test_another_size_is_refused(enwik8, archive, tmp_path):
    fails(
        enwik8,
        archive,
        tmp_path / 'data',
        rf"enwik8 must have 100,000,000 bytes, but '{archive}' holds 3,001; .* --size 3001",
    )


def test_a_damaged_archive_is_refused(enwik8, archive, tmp_path):
    data = archive.read_bytes()
    for damaged in (data[:-100], data[:100] + bytes(100) + data[200:], b''):
        archive.write_bytes(damaged)
        fails(
            enwik8,
            archive,
            tmp_path / 'data',
            'is damaged or holds no enwik8|holds 0',
            '--size',
            str(SIZE),
        )


def test_a_zip_of_something_else_is_refused(enwik8, tmp_path):
    with zipfile.ZipFile(tmp_path / 'a.zip', 'w') as file:
        file.writestr('enwik9', 'text')
    fails(enwik8, tmp_path / 'a.zip', tmp_path / 'data', 'holds no enwik8')


def test_a_missing_archive_and_an_unknown_kind_are_refused(enwik8, tmp_path):
    fails(enwik8, tmp_path / 'no.zip', tmp_path / 'data', "no.zip' does not exist")
    (tmp_path / 'enwik8.7z').touch()
    fails(enwik8, tmp_path / 'enwik8.7z', tmp_path / 'data', 'must be a .zip or a .gz file')
