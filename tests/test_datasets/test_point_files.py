"""Point clouds in the formats of their data sets, whole and damaged."""

import numpy as np
import pytest
import trimesh
from pypcd4 import Encoding, PointCloud
from scipy.spatial import cKDTree

from aft_mm.datasets import UnusableFile, read_points
from aft_mm.tokenizers import bounding_cube, decode_points, encode_points

from ..errors import refuses_input


def write(path, points):
    name = path.name.lower()
    if name.endswith('.npy'):
        np.save(path, points)
    elif name.endswith('.pcd'):
        encoding = Encoding[path.stem.upper()]
        PointCloud.from_xyz_points(points).save(path, encoding=encoding)
    elif name.endswith('.ply'):
        trimesh.PointCloud(points).export(path)
    else:
        np.savetxt(path, points)


NAMES = ['a.npy', 'a.ply', 'a.PLY', 'a.pts', 'a.xyz']
NAMES += ['ascii.pcd', 'binary.pcd', 'binary_compressed.pcd']


@pytest.fixture
def points():
    return np.random.default_rng(0).standard_normal((63, 3)).astype(np.float32)


@pytest.mark.parametrize('name', NAMES)
def test_points_come_back(tmp_path, points, name):
    write(tmp_path / name, points)
    back = read_points(tmp_path / name)
    assert back.dtype == np.float64
    np.testing.assert_allclose(back, points, rtol=1e-6)


def test_integers_and_doubles_are_points_too(tmp_path, points):
    for array in (points.astype(np.float64), (points * 10).astype(np.int64)):
        np.save(tmp_path / 'a.npy', array)
        np.testing.assert_array_equal(read_points(tmp_path / 'a.npy'), array)


def test_a_text_ply_holds_what_it_announces(tmp_path, points):
    path, axes = tmp_path / 'a.ply', [f'property float {axis}' for axis in 'xyz']
    lines = ['ply', 'format ascii 1.0', 'element vertex 63', *axes, 'end_header']
    lines += [' '.join(map(str, point)) for point in points.tolist()]
    path.write_text('\n'.join(lines) + '\n')
    np.testing.assert_allclose(read_points(path), points, rtol=1e-6)
    for missing in (1, 2):
        path.write_text('\n'.join(lines[:-missing]) + '\n')
        refuses_input(f'63 rows announced, {63 - missing} found', read_points, path)


@pytest.mark.parametrize('name', ['a.npy', 'a.pcd', 'a.ply'])
def test_a_text_under_the_name_of_another_format_gets_a_short_reason(tmp_path, name):
    (tmp_path / name).write_text('hello\nworld\n')
    with pytest.raises(UnusableFile) as error:
        read_points(tmp_path / name)
    assert str(error.value) == (
        f"point cloud '{tmp_path / name}' cannot be read: it is damaged or "
        'of another kind than its name says'
    )


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        ('0,1,2\n3,4,5\n', "line 1 .*, got '0,1,2'"),
        ('0;1;2\n3;4;5\n', 'line 1 .*, got'),
        ('0,5 1,5 2,5\n', 'line 1 .*, got'),
        ('x y z\n0 1 2\n', "line 1 .*, got 'x y z'"),
        ('2\n0 1 2\n3 4 5\n', "line 1 .*, got '2'"),
        ('# x y z\n\n0 1 2\n1.0D+00 4 5\n', "line 4 .*, got '1.0D"),
        ('0 1 2\n3 4\n', "line 2 .*, got '3 4'"),
        ('', 'it has no points'),
        ('# nothing\n', 'it has no points'),
    ],
)
@pytest.mark.filterwarnings('error')
def test_a_text_of_other_rows_is_refused_with_its_line(tmp_path, content, reason):
    for name in ('a.xyz', 'a.pts'):
        (tmp_path / name).write_text(content)
        reason = reason.replace(' .*,', ' must be three numbers with spaces between,')
        with pytest.raises(UnusableFile, match=f"{name}' cannot be read: {reason}"):
            read_points(tmp_path / name)


def test_a_byte_order_mark_is_no_number(tmp_path, points):
    np.savetxt(tmp_path / 'a.xyz', points, encoding='utf-8-sig')
    np.testing.assert_allclose(read_points(tmp_path / 'a.xyz'), points, rtol=1e-6)


def test_more_than_the_header_announces_is_refused(tmp_path, points):
    np.save(tmp_path / 'a.npy', points)
    trimesh.PointCloud(points).export(tmp_path / 'a.ply', encoding='ascii')
    write(tmp_path / 'binary.pcd', points)
    for name, more, reason in (
        ('a.npy', bytes(12), 'it has more bytes than its header announces'),
        ('binary.pcd', b'more bytes..', 'it has more bytes than its header announces'),
        ('a.ply', b'1 2 3\n', '63 rows announced, 64 found'),
    ):
        with (tmp_path / name).open('ab') as file:
            read_points(tmp_path / name)
            if name == 'binary.pcd':  # as PCL ends files
                file.write(bytes(4000))
                file.flush()
                assert len(read_points(tmp_path / name)) == len(points)
            file.write(more)
        with pytest.raises(UnusableFile, match=f'cannot be read: {reason}$'):
            read_points(tmp_path / name)


def test_a_pcd_file_of_other_fields_is_refused(tmp_path, points):
    cloud = PointCloud.from_points(points, ('x', 'y', 'intensity'), (np.float32,) * 3)
    cloud.save(tmp_path / 'a.pcd')
    with pytest.raises(UnusableFile, match='it has no x, y and z, but x, y, intensity$'):
        read_points(tmp_path / 'a.pcd')


@pytest.mark.parametrize('name', ['a.npy', 'a.pcd', 'text.pcd', 'a.ply', 'single.ply', 'a.xyz'])
def test_a_cloud_far_from_the_origin_keeps_its_shape(tmp_path, points, name):
    points = points.astype(np.float64)
    far = points + 1e9
    if name.endswith('.pcd'):
        cloud = PointCloud.from_points(far, (*'xyz',), (np.float64,) * 3)
        cloud.save(tmp_path / name, Encoding.ASCII if name == 'text.pcd' else Encoding.BINARY)
        if name == 'text.pcd':  # digits that its float32 would lose
            text = (tmp_path / name).read_text().replace('SIZE 8 8 8', 'SIZE 4 4 4')
            (tmp_path / name).write_text(text)
    elif name.endswith('.ply'):
        kind = 'float' if name == 'single.ply' else 'double'
        axes = ''.join(f'property {kind} {axis}\n' for axis in 'xyz')
        rows = '\n'.join(' '.join(map(repr, row)) for row in far.tolist())
        header = f'ply\nformat ascii 1.0\nelement vertex 63\n{axes}end_header\n'
        (tmp_path / name).write_text(header + rows)
    else:
        write(tmp_path / name, far)
    back = read_points(tmp_path / name)
    np.testing.assert_allclose(back - 1e9, points, atol=1e-6)
    np.testing.assert_array_equal(encode_points(back), encode_points(points))


@pytest.mark.parametrize('name', ['a.npy', 'binary.pcd', 'binary_compressed.pcd', 'a.ply'])
def test_a_shape_that_is_lost_in_float32_is_refused(tmp_path, points, name):
    write(tmp_path / name, points + np.float32(1000))
    read_points(tmp_path / name)
    write(tmp_path / name, points + np.float32(4.6e6))
    message = 'must be near the origin to keep its shape in float32, got coordinates up to 46000'
    refuses_input(message, read_points, tmp_path / name)


def test_a_pcd_file_that_ends_between_two_points_is_refused(tmp_path, points):
    path = tmp_path / 'binary.pcd'
    write(path, points)
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(UnusableFile, match='63 points announced, 62 found'):
        read_points(path)


@pytest.mark.parametrize(
    ('array', 'message'),
    [
        (np.zeros((5, 2)), r'must contain numbers \[N, 3\], got float64 \[5, 2\]'),
        (np.zeros((2, 5, 3)), r'got float64 \[2, 5, 3\]'),
        (np.array([['a', 'b', 'c']]), r'must contain numbers \[N, 3\], got <U1 \[1, 3\]'),
        (np.zeros((0, 3)), 'P at least 1'),
        (np.ones((5, 3)), 'cannot be used: points must differ, but all 5 are'),
        (np.array([[dict()]], dtype=object), 'cannot be read: it is damaged or of another kind'),
    ],
)
def test_a_cloud_that_is_none_is_refused(tmp_path, array, message):
    np.save(tmp_path / 'a.npy', array)
    with pytest.raises(UnusableFile, match=message):
        read_points(tmp_path / 'a.npy')


def test_a_mesh_a_missing_file_and_another_kind_are_refused(tmp_path):
    trimesh.creation.box().export(tmp_path / 'a.ply')
    with pytest.raises(UnusableFile, match='it is a mesh, which `aft_mm convert shapenet`'):
        read_points(tmp_path / 'a.ply')
    with pytest.raises(UnusableFile, match="no.npy' cannot be read: it does not exist$"):
        read_points(tmp_path / 'no.npy')
    (tmp_path / 'folder.npy').mkdir()
    with pytest.raises(UnusableFile, match="folder.npy' cannot be read: Is a directory$"):
        read_points(tmp_path / 'folder.npy')
    with pytest.raises(UnusableFile, match="a.off' must end in one of .npy, .pcd, .ply, .pts"):
        read_points(tmp_path / 'a.off')


def test_modelnet_chairs(pack):
    paths = sorted(pack('modelnet10_pcd').glob('chair/test/*.pcd'))
    assert len(paths) == 40
    for path in paths:
        points = read_points(path)
        assert points.shape == (1024, 3)
        # Binary PCD is a header and float32.
        values = np.frombuffer(path.read_bytes()[-1024 * 12 :], '<f4')
        np.testing.assert_array_equal(points.ravel(), values)


def test_real_shapes_look_the_same_after_a_round_trip_through_tokens(pack):
    """Their Chamfer distance, mean squares of both directions summed, is below that of one step."""
    paths = sorted(pack('shapenet_part_sample').glob('*/points/*.pts'))
    assert len(paths) == 12
    for path in paths:
        points = read_points(path)
        box = bounding_cube(points)
        back = decode_points(encode_points(points, box=box), box=box)
        assert len(back) == len(points)
        step = box[1] / 256
        there, again = (cKDTree(one).query(two)[0] for one, two in ((points, back), (back, points)))
        assert 0 < np.sqrt(np.mean(there**2) + np.mean(again**2)) < step
        # Half a step along each axis.
        assert max(there.max(), again.max()) <= np.sqrt(3) / 2 * step * 1.001
