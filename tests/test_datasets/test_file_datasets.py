"""Data sets of files: their lists, and files that cannot be used."""

import numpy as np
import pytest
from mmengine.registry import DATASETS
from PIL import Image

from aft_mm.datasets import (
    CelebA,
    FileDataset,
    ImageFolder,
    PointClouds,
    UnusableFile,
    point_clouds,
)
from aft_mm.structures import SequenceSample

from ..errors import refuses

LINES = ['a.jpg 0', 'b.jpg 2', 'c.jpg 0', 'd.jpg 1', 'e.jpg 0']


@pytest.fixture
def celeba(tmp_path):
    (tmp_path / 'img_align_celeba').mkdir()
    (tmp_path / 'list_eval_partition.txt').write_text('\n'.join(LINES) + '\n')
    rng = np.random.default_rng(0)
    for line in LINES:
        image = Image.fromarray(rng.integers(0, 256, (218, 178, 3), dtype=np.uint8))
        image.save(tmp_path / 'img_align_celeba' / line.split()[0])
    return tmp_path


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names(dataset, key='img_path'):
    return [dataset.get_data_info(i)[key].rpartition('/')[2] for i in range(len(dataset))]


class TestCelebA:
    @pytest.mark.parametrize(
        ('split', 'expected'),
        [('train', ['a.jpg', 'c.jpg', 'e.jpg']), ('val', ['d.jpg']), ('test', ['b.jpg'])],
    )
    def test_the_list_says_which_images_belong_to_a_split(self, celeba, split, expected):
        dataset = DATASETS.build(dict(type='aft_mm.CelebA', data_root=str(celeba), split=split))
        train = split == 'train'
        assert names(dataset) == expected and dataset.test_mode == (not train)
        assert CelebA(str(celeba), split, test_mode=train).test_mode == train

    @pytest.mark.parametrize('name', ['list_eval_partition.txt', 'img_align_celeba'])
    def test_a_missing_part_is_named(self, celeba, name):
        (celeba / name).rename(celeba / 'elsewhere')
        message = rf'{celeba}/{name} of CelebA does not exist: point data_root \(or AFT_MM_DATA\)'
        with pytest.raises(FileNotFoundError, match=message):
            CelebA(str(celeba))

    def test_missing_images_are_counted(self, celeba):
        for name in 'ce':
            (celeba / f'img_align_celeba/{name}.jpg').unlink()
        message = 'lacks 2 of the 3 images that .* lists in the train split, the first is c.jpg'
        with pytest.raises(FileNotFoundError, match=message):
            CelebA(str(celeba))
        assert len(CelebA(str(celeba), 'val')) == 1

    @pytest.mark.parametrize('line', ['a.jpg 3', 'a.jpg', 'a.jpg 0 1', ''])
    def test_a_line_that_says_something_else_is_named(self, celeba, line):
        lines = [*LINES[:2], line, *LINES[2:]]
        (celeba / 'list_eval_partition.txt').write_text('\n'.join(lines))
        message = f'line 3 of .*list_eval_partition.txt must be the name.*, got {line!r}'
        with pytest.raises(ValueError, match=message):
            CelebA(str(celeba))

    def test_an_empty_and_an_unknown_split_are_refused(self, celeba):
        (celeba / 'list_eval_partition.txt').write_text('a.jpg 0\n')
        with pytest.raises(ValueError, match='has no image of the val split of CelebA'):
            CelebA(str(celeba), 'val')
        with pytest.raises(ValueError, match="split must be one of train, val, test, got 'x'"):
            CelebA(str(celeba), 'x')

    def test_data_pack(self, pack):
        root = str(pack('celeba'))
        pipeline = [
            dict(type='aft_mm.LoadRGBImage'),
            dict(type='aft_mm.SuperResolutionPair', crop_size=138),
            dict(type='aft_mm.PackSequence', image_shape=(32, 32, 3), tokens='pixels'),
        ]
        sizes = {split: len(CelebA(root, split)) for split in ('train', 'val', 'test')}
        assert sizes == dict(train=800, val=120, test=120)
        dataset = CelebA(root, 'test', pipeline=pipeline)
        for index in range(0, 120, 17):
            sample = dataset[index]
            target = sample['inputs'].view(8, 4, 8, 4, 3).float().mean((1, 3))
            source = sample['data_samples'].source.view(8, 8, 3)
            assert (target - source).abs().max() <= 0.5


class TestImageFolder:
    def test_every_image_below_the_folder_in_order(self, tmp_path):
        touch(tmp_path, 'b/2.PNG', 'b/10.jpeg', 'a.webp', 'c/d/e.jpg', 'b/notes.txt')
        dataset = ImageFolder(str(tmp_path))
        assert names(dataset) == ['a.webp', '10.jpeg', '2.PNG', 'e.jpg']
        assert not dataset.test_mode

    def test_a_missing_and_an_empty_folder_are_named(self, tmp_path):
        message = rf"data_root '{tmp_path}' contains no image file \(.bmp"
        with pytest.raises(ValueError, match=message):
            ImageFolder(str(tmp_path))
        with pytest.raises(FileNotFoundError, match="data_root '.*/no' is not a folder"):
            ImageFolder(str(tmp_path / 'no'))


class TestPointClouds:
    @pytest.fixture
    def root(self, tmp_path):
        """Chairs by synset, cars and a class of our own by name."""
        touch(tmp_path, *(f'03001627/{name}.npy' for name in ('train/b', 'train/a', 'val/c')))
        touch(tmp_path, 'car/train/d.pcd', 'car/train/notes.txt', 'teapot/train/e.ply')
        touch(tmp_path, '12/train/f.npy')
        touch(tmp_path, 'splits/list.txt')
        return tmp_path

    @pytest.mark.parametrize(
        ('classes', 'split', 'files', 'labels'),
        [
            (('chair',), 'train', ['a', 'b'], ['chair'] * 2),
            ('03001627', 'val', ['c'], ['chair']),
            (['teapot', 'car'], 'train', ['e', 'd'], ['teapot', 'car']),
            (
                'all',
                'train',
                ['a', 'b', 'f', 'd', 'e'],
                ['chair', 'chair', '12', 'car', 'teapot'],
            ),
            ('all', 'val', ['c'], ['chair']),
            (3001627, 'val', ['c'], ['chair']),
            ((3001627, 12), 'train', ['a', 'b', 'f'], ['chair', 'chair', '12']),
        ],
    )
    def test_classes_are_folders_or_classes_of_shapenet(self, root, classes, split, files, labels):
        settings = dict(type='aft_mm.PointClouds', data_root=str(root), classes=classes)
        dataset = DATASETS.build(dict(settings, split=split))
        assert [name.partition('.')[0] for name in names(dataset, 'points_path')] == files
        assert names(dataset, 'class_name') == labels
        assert dataset.test_mode == (split != 'train')

    @pytest.mark.parametrize(
        ('classes', 'split', 'message'),
        [
            (
                'boat',
                'train',
                "'boat' has no folder in data_root '.*', which has 03001627, 12, car",
            ),
            ('airplane', 'train', "class 'airplane' has no folder in data_root"),
            (('car', 'car'), 'train', "folders that differ, got 'car' and 'car', both of 'car'"),
            (['chair', '03001627'], 'val', "'chair' and '03001627', both of '03001627'$"),
            ((12, 'teapot', 12), 'train', "got '12' and '12', both of '12'"),
            ('all', 'test', r"data_root '.*' has no folder <class>/test"),
            ('car', 'val', r"'car' has no point cloud \(.npy, .* .xyz\) in '.*/car/val'"),
        ],
    )
    def test_a_class_that_is_empty_or_missing_is_named(self, root, classes, split, message):
        with pytest.raises((FileNotFoundError, ValueError), match=message) as error:
            PointClouds(str(root), classes, split)
        assert '\n' not in str(error.value)

    def test_other_files_are_counted_and_named(self, root, monkeypatch):
        said = []
        monkeypatch.setattr(point_clouds, 'warn', said.append)
        PointClouds(str(root), 'chair')
        assert not said
        touch(root, 'car/train/a.las', 'car/train/b.LAS', 'teapot/train/.hidden')
        PointClouds(str(root))
        assert said == [
            f"data_root '{root}': 3 files were not read: .las (2), .txt (1), first "
            "'car/train/a.las'; convert to .npy, .pcd, .ply, .pts or .xyz"
        ]

    @pytest.mark.parametrize(
        ('more', 'message'),
        [
            ('car/train/d.npy', "'d' of class 'car' must be one file, got '.*d.npy' and d.pcd"),
            ('12/train/f.NPY', "'f' of class '12' must be one file, got '"),
            ('chair/train/x.npy', "one folder, got 'chair' and '03001627': put"),
        ],
    )
    def test_a_cloud_is_loaded_once(self, root, more, message):
        touch(root, more)
        for classes in ('all', ['car', 'chair', 12]):
            refuses(message, PointClouds, str(root), classes)
        # Another folder has the split of only one of them.
        assert len(PointClouds(str(root), 'chair', 'val')) == 1

    def test_meshes_are_for_the_converter(self, tmp_path):
        touch(tmp_path, 'desk/train/a.off')
        with pytest.raises(
            ValueError, match='it has meshes, which `aft_mm convert shapenet` samples'
        ):
            PointClouds(str(tmp_path))
        with pytest.raises(FileNotFoundError, match='is not a folder'):
            PointClouds(str(tmp_path / 'no'))

    def test_the_classes_of_shapenet_part(self, pack):
        root = pack('shapenet_part_sample')
        lines = (root / 'synsetoffset2category.txt').read_text().splitlines()
        expected = {synset: name.lower() for name, synset in map(str.split, lines)}
        found = PointClouds(str(root), split='points')
        for index in range(len(found)):
            info = found.get_data_info(index)
            assert f'/{info["class_name"]}/' not in info['points_path']
            assert expected.pop(info['points_path'].split('/')[-3]) == info['class_name']
        assert not expected


class Numbers(FileDataset):
    def __init__(self, bad, **kwargs):
        def read(results):
            if results['number'] in bad:
                raise UnusableFile(f'file {results["number"]} is damaged.')
            return dict(inputs=results['number'], data_samples=SequenceSample())

        super().__init__(pipeline=[read], **kwargs)

    def load_data_list(self):
        return [dict(number=number) for number in range(10)]


class TestFileDataset:
    def test_an_unusable_file_is_replaced_by_a_random_one_and_named(self):
        dataset, found = Numbers({3, 4}), set()
        for _ in range(100):
            sample = dataset[3]
            found.add(sample['inputs'])
            skipped = sample['data_samples'].skipped
            assert skipped[0] == 'file 3 is damaged.'
            assert set(skipped) <= {'file 3 is damaged.', 'file 4 is damaged.'}
        assert found == set(range(10)) - {3, 4}
        assert 'skipped' not in dataset[2]['data_samples']

    def test_in_a_test_it_stops_the_run(self):
        dataset = Numbers({3}, test_mode=True)
        assert dataset[2]['inputs'] == 2
        with pytest.raises(UnusableFile, match='file 3 is damaged'):
            dataset[3]

    def test_nothing_but_unusable_files_end_the_run(self):
        message = r'^20 files in a row cannot be used, the last one: file \d is damaged\.$'
        with pytest.raises(ValueError, match=message):
            Numbers(set(range(10)))[0]

    def test_other_errors_are_not_swallowed(self):
        dataset = Numbers(())
        dataset.pipeline.transforms.append(lambda results: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dataset[0]
