"""Meshes sampled to point clouds by ``aft_mm convert shapenet``."""

import re
import subprocess
import sys

import numpy as np
import pytest
import trimesh

from aft_mm.convert import shapenet as shapenet_module
from aft_mm.convert.shapenet import Mesh, split_by_hash
from aft_mm.datasets import PointClouds, read_points

from ..errors import stops
from ..helpers import command

MODEL = 'models/model_normalized.obj'


@pytest.fixture
def convert(capsys):
    def call(*words):
        command('convert shapenet')(words)
        return capsys.readouterr().out

    return call


def box(path, extents=(4, 2, 1)):
    path.parent.mkdir(parents=True, exist_ok=True)
    trimesh.creation.box(extents).export(path)


def written(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file())


@pytest.fixture
def shapenet(tmp_path):
    for name in ('03001627/a', '03001627/b', '03001627/c', '03001627/d', '02958343/a'):
        box(tmp_path / 'meshes' / name / MODEL)
        (tmp_path / 'meshes' / name / 'models/model_normalized.json').touch()
    (tmp_path / 'all.csv').write_text(
        'id,synsetId,subSynsetId,modelId,split\n1,03001627,0,a,test\n2,03001627,0,b,train\n'
        '3,03001627,0,c,val\n4,02958343,0,a,train\n'
    )
    return tmp_path


def test_points_are_on_the_surface_and_uniform_by_area(convert, tmp_path):
    box(tmp_path / 'meshes/crate/train/a.off')
    convert(tmp_path / 'meshes', tmp_path / 'out')
    points = np.load(tmp_path / 'out/crate/train/a.npy')
    assert points.shape == (15000, 3) and points.dtype == np.float32
    on_face = np.isclose(np.abs(points), [2, 1, 0.5], rtol=0, atol=1e-6)
    assert on_face.any(1).all() and (np.abs(points) <= [2.000001, 1.000001, 0.500001]).all()
    # 4·2·1 box: the pairs of faces have 2·1, 4·1 and 4·2 of area; five standard deviations.
    shares = np.array([2, 4, 8]) / 14
    np.testing.assert_allclose(
        on_face.mean(0), shares, atol=5 * np.sqrt(shares * (1 - shares) / 15000).max()
    )


def test_the_official_split_omits_unlisted_models(convert, shapenet):
    out = shapenet / 'out'
    report = convert(shapenet / 'meshes', out, '--splits', shapenet / 'all.csv')
    expected = '02958343/train/a 03001627/test/a 03001627/train/b 03001627/val/c'
    assert written(out) == [f'{name}.npy' for name in expected.split()]
    assert report.endswith(f'{out}: 4 written, 1 not in {shapenet}/all.csv\n')
    assert len(PointClouds(str(out), ('chair', 'car'))) == 2
    assert not np.array_equal(
        np.load(out / '02958343/train/a.npy'), np.load(out / '03001627/train/b.npy')
    )


@pytest.mark.parametrize(
    ('ratio', 'split'), [((1, 0, 0), 'train'), ((0, 3, 0), 'val'), ((0, 0, 0.5), 'test')]
)
def test_the_ratio_is_used_without_a_list(convert, shapenet, ratio, split):
    convert(shapenet / 'meshes', shapenet / 'out', '--ratio', *ratio, '--classes', 'car')
    assert written(shapenet / 'out') == [f'02958343/{split}/a.npy']


def test_the_split_by_hash_has_the_shares_and_depends_on_the_model_only(convert):
    meshes = [Mesh(None, 'car', str(number), None) for number in range(3000)]
    splits = [split_by_hash(mesh, (0.7, 0.1, 0.2)) for mesh in meshes]
    for split, share in zip(('train', 'val', 'test'), (0.7, 0.1, 0.2), strict=True):
        assert splits.count(split) / 3000 == pytest.approx(share, abs=0.04)
    assert splits[-1] == split_by_hash(meshes[-1]._replace(path='elsewhere'), (7, 1, 2))


def test_every_mesh_format_at_any_depth(tmp_path):
    names = ['train/a.off', 'test/b.obj', 'train/deep/c.ply', 'val/d.STL', 'test/e.glb']
    for name in names:
        box(tmp_path / 'meshes/crate' / name)
    # By the command, whose functions must reach the processes.
    words = [sys.executable, '-m', 'aft_mm', 'convert', 'shapenet', 'meshes', 'out', '--jobs', '2']
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith(': 5 written\n'), done.stderr
    expected = 'test/b.npy test/e.npy train/a.npy train/deep-c.npy val/d.npy'
    assert written(tmp_path / 'out/crate') == expected.split()


def test_a_second_run_resumes(convert, tmp_path):
    out = tmp_path / 'out'
    for name in 'abc':
        box(tmp_path / f'meshes/crate/train/{name}.off')
    convert(tmp_path / 'meshes', out)
    first = {name: np.load(out / f'crate/train/{name}.npy') for name in 'abc'}
    (out / 'crate/train/b.npy').unlink()
    np.save(out / 'crate/train/c.npy', np.zeros(3))
    assert convert(tmp_path / 'meshes', out).endswith(': 1 written, 2 there already\n')
    np.testing.assert_array_equal(np.load(out / 'crate/train/b.npy'), first['b'])
    assert np.load(out / 'crate/train/c.npy').shape == (3,)  # not touched
    assert written(out / 'crate/train') == ['a.npy', 'b.npy', 'c.npy']
    assert convert(tmp_path / 'meshes', out) == f'{out}: 0 written, 3 there already\n'


def test_damaged_meshes_are_named_and_counted(tmp_path, capsys):
    folder = tmp_path / 'meshes/crate/train'
    box(folder / 'good.off')
    for name, text in dict(
        half='OFF\n3 1 0\n0 0 0\n1 0',
        points='OFF\n3 0 0\n0 0 0\n1 0 0\n0 1 0\n',
        flat='OFF\n3 1 0\n0 0 0\n1 1 1\n2 2 2\n3 0 1 2\n',
        empty='',
        far='OFF\n3 1 0\n1e9 0 0\n1000000001 0 0\n1e9 1 0\n3 0 1 2\n',
        nan='OFF\n3 1 0\n0 0 nan\n1 0 0\n0 1 0\n3 0 1 2\n',
        index='OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 7\n',
    ).items():
        (folder / f'{name}.off').write_text(text)
    (folder / 'other.dae').touch()
    with pytest.raises(SystemExit) as end:
        command('convert shapenet')([tmp_path / 'meshes', tmp_path / 'out'])
    report = capsys.readouterr().out.splitlines()[-10:]
    assert end.value.code == 1 and report[0] == f'{tmp_path}/out: 1 written'
    assert report[1].startswith("1 file was not read: .dae (1), first 'crate/train/other.dae'; ")
    assert report[2] == '7 damaged:'
    reasons = dict(
        empty='it must begin with OFF and the numbers of vertices and faces',
        far='it is too far from the origin to keep its shape in float32',
        flat='it has no surface',
        half='3 vertices and 1 faces announced, 2 rows found',
        index='indices of faces must be 0 to 2, got 3 0 1 7',
        nan='it has no surface',
        points='it has no faces',
    )
    lines = [f"  '{folder}/{name}.off': {reason}" for name, reason in reasons.items()]
    assert report[3:] == lines
    assert written(tmp_path / 'out') == ['crate/train/good.npy']


@pytest.mark.parametrize(
    ('suffix', 'edit', 'reason'),
    [
        ('.off', lambda data: data[:-20], '8 vertices and 12 faces announced, '),
        ('.off', lambda data: data.replace(b'8 12 0', b'8 6 0'), '8 .* and 6 .*, 20 rows'),
        ('.off', lambda data: data.replace(b'8 12 0', b'8 24 0'), '8 .* and 24 .*, 20 rows'),
        ('.off', lambda data: data.replace(b'8 12 0', b'9 11 0'), 'a vertex must be three numbers'),
        ('.off', lambda data: data.replace(b'8 12 0', b'7 13 0'), 'a face must be a number of'),
        ('.off', lambda data: data.replace(b'.', b','), 'a vertex must be three .*,'),
        ('.obj', lambda data: re.sub(rb'^f .*$', b'f 0 1 2', data, flags=re.M), 'begin with 1'),
        ('.obj', lambda data: data.rstrip()[:-3], 'a face of fewer than three corners'),
        ('.obj', lambda data: data.replace(b'.', b','), 'got a comma or semicolon'),
        ('.ply', lambda data: data.rstrip()[:-9], '20 rows announced, 19 found'),
        ('.ply', lambda data: data + b'3 0 1 2\n', '20 rows announced, 21 found'),
        ('.stl', lambda data: data[:400], '12 triangles announced, 6.32 found'),
        ('.stl', lambda data: data + data[-50:], '12 triangles announced, 13 found'),
        ('.STL', lambda data: data[:-30], 'it does not end with endsolid'),
        ('.glb', lambda data: data[:-4], 'it is damaged'),
    ],
)
def test_meshes_that_are_not_whole_are_refused(tmp_path, suffix, edit, reason):
    kinds = {'.STL': 'stl_ascii', '.ply': 'ply'}
    mesh, path = trimesh.creation.box((4.5, 2, 1)), tmp_path / f'a{suffix}'
    options = dict(encoding='ascii') if suffix == '.ply' else {}
    mesh.export(path, file_type=kinds.get(suffix, suffix[1:]), **options)
    sample = Mesh(path, 'crate', 'a', None)
    assert shapenet_module.sample(sample, tmp_path / 'a.npy') is None
    path.write_bytes(edit(path.read_bytes()))
    assert re.match(f"'{path}': .*{reason}", shapenet_module.sample(sample, tmp_path / 'b.npy'))
    assert not (tmp_path / 'b.npy').exists()


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ('no', "the folder of meshes 'no' does not exist"),
        (
            'meshes out --classes boat',
            "class 'boat' has no folder in 'meshes', which has 02958343, 03001627",
        ),
        ('meshes/03001627/a out --classes images', "class 'images' has no folder"),
        ('nothing', r"'nothing' has no mesh \(.glb, .obj, .off, .ply, .stl\) in the folder of a"),
        ('meshes out --splits no.csv', "--splits 'no.csv' does not exist"),
        (
            'meshes out --splits other.csv',
            "--splits 'other.csv' must be a table with the columns synsetId, modelId and split",
        ),
        ('meshes out --splits dev.csv', "--splits 'dev.csv' must be .*train, val, test"),
        (f'meshes out --splits meshes/02958343/a/{MODEL}', '--splits .* must be a table'),
        ('meshes out --ratio 0 0 0', '--ratio must be three shares, got'),
        ('meshes out --ratio 1 1 -1', '--ratio must be three shares, got'),
        ('meshes out --jobs 0', '--jobs must be at least 1, got 0'),
        ('bad', "no mesh below 'bad' could be sampled; the first error is 'bad/crate/a.off': "),
        (
            'twice',
            "'twice/crate/a.obj' and 'twice/crate/a.off' are both model 'a' of class 'crate'",
        ),
        (
            'mixed out --ratio 1 0 0',
            "'mixed/crate/a.off' and 'mixed/crate/train/a.off' are both model 'a' of class 'crate' "
            'in the train split; remove one of them',
        ),
    ],
)
def test_bad_arguments_give_a_one_line_message(convert, shapenet, monkeypatch, words, message):
    monkeypatch.chdir(shapenet)
    (shapenet / 'nothing').mkdir()
    (shapenet / 'other.csv').write_text('a,b\n1,2\n')
    (shapenet / 'dev.csv').write_text('synsetId,modelId,split\n03001627,a,dev\n')
    for name in ('twice/crate/a.off', 'twice/crate/a.obj', 'mixed/crate/a.off'):
        box(shapenet / name)
    box(shapenet / 'mixed/crate/train/a.off')
    (shapenet / 'bad/crate').mkdir(parents=True)
    (shapenet / 'bad/crate/a.off').touch()
    stops(f'^Error: {message}', convert, *words.split())
    assert not written(shapenet / 'out') and not written(shapenet / 'data')


def test_one_model_may_be_in_two_splits(convert, tmp_path):
    for name in ('a.off', 'train/a.off'):
        box(tmp_path / 'meshes/crate' / name)
    convert(tmp_path / 'meshes', tmp_path / 'out', '--ratio', 0, 0, 1)
    assert written(tmp_path / 'out/crate') == ['test/a.npy', 'train/a.npy']


@pytest.mark.parametrize('blocked', ['out', 'out/crate', 'out/crate/train'])
def test_an_unwritable_folder_is_reported_before_sampling(convert, tmp_path, monkeypatch, blocked):
    box(tmp_path / 'meshes/crate/train/a.off')
    (tmp_path / blocked).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / blocked).touch()
    sampled = []
    monkeypatch.setattr(shapenet_module, 'sample', sampled.append)
    message = 'cannot be written: (Not a directory|File exists)$'
    match = f"^Error: OUT '{tmp_path}/out/crate/train/a.npy' {message}"
    stops(match, convert, tmp_path / 'meshes', tmp_path / 'out')
    assert not sampled


def test_modelnet_meshes(convert, pack, tmp_path):
    meshes = pack('modelnet10_off')
    assert convert(meshes, tmp_path).endswith(': 2 written\n')
    dataset = PointClouds(str(tmp_path), 'bathtub')
    assert len(dataset) == 2
    for index in range(2):
        path = dataset.get_data_info(index)['points_path']
        points = read_points(path)
        name = path.rpartition('/')[2].replace('.npy', '.off')
        mesh = trimesh.load_mesh(meshes / 'bathtub/train' / name, process=False)
        # On some triangle each: the nearest point of every triangle, one cloud point after another.
        for point in points[:20].astype(np.float64):
            nearest = trimesh.triangles.closest_point(
                mesh.triangles, np.tile(point, (len(mesh.triangles), 1))
            )
            assert np.linalg.norm(nearest - point, axis=1).min() < 1e-4
        np.testing.assert_allclose(
            [points.min(0), points.max(0)], mesh.bounds, atol=0.02 * mesh.extents.max()
        )
