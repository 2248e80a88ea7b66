"""Where a package of an extra is missing, one line names the extra, before any work."""

import sys

import numpy as np
import pytest

from aft_mm.datasets import read_points
from aft_mm.errors import UserError
from aft_mm.evaluation import BLEU, FID, LPIPS, ErrorRate, ImageQuality

from .errors import stops
from .helpers import command

SHAPE = (32, 32, 3)


def read(name):
    return lambda folder: read_points(folder / name)


@pytest.mark.parametrize(
    'package, extra, user, use',
    [
        ('trimesh', 'clouds', '.ply files need', read('a.ply')),
        ('trimesh', 'clouds', '.ply files need', read('A.PLY')),
        ('pypcd4', 'clouds', '.pcd files need', read('a.pcd')),
        ('torchmetrics', 'quality', 'ImageQuality needs', lambda _: ImageQuality(SHAPE, SHAPE)),
        ('torchmetrics', 'quality', 'FID needs', lambda _: FID(SHAPE)),
        ('torchmetrics', 'quality', 'LPIPS needs', lambda _: LPIPS(SHAPE)),
        ('sacrebleu', 'text', 'BLEU needs', lambda _: BLEU()),
        ('jiwer', 'speech', 'ErrorRate needs', lambda _: ErrorRate('word')),
    ],
)
def test_the_extra_is_named(package, extra, user, use, tmp_path, monkeypatch):
    for module in {package, *sys.modules}:
        if module.partition('.')[0] == package:
            monkeypatch.setitem(sys.modules, module, None)
    for name in ('a.ply', 'A.PLY'):
        header = 'ply\nformat ascii 1.0\nelement vertex 2\nend_header\n'
        (tmp_path / name).write_text(header)
    (tmp_path / 'a.pcd').write_text('POINTS 2\nSIZE 4 4 4\nDATA ascii\n' + '1 2 3\n' * 20)
    with pytest.raises(UserError) as error:
        use(tmp_path)
    assert str(error.value) == f'{user} {package}, which pip install aft_mm[{extra}] installs'


def test_arrays_and_text_need_no_extra(tmp_path, monkeypatch):
    for package in ('trimesh', 'pypcd4'):
        monkeypatch.setitem(sys.modules, package, None)
    points = np.random.default_rng(0).normal(size=(7, 3))
    np.save(tmp_path / 'a.npy', points)
    np.savetxt(tmp_path / 'a.xyz', points)
    for name in ('a.npy', 'a.xyz'):
        np.testing.assert_allclose(read_points(tmp_path / name), points)


def test_meshes_are_refused_before_they_are_searched(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'trimesh', None)
    message = r'^Error: meshes need trimesh, which pip install aft_mm\[clouds\] installs$'
    stops(message, command('convert shapenet'), (tmp_path / 'nowhere', tmp_path / 'out'))
