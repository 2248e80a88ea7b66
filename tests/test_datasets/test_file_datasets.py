"""Data sets of files: their lists, and files that cannot be used."""

import numpy as np
import pytest
from mmengine.registry import DATASETS
from PIL import Image

from aft_mm.datasets import CelebA, FileDataset, ImageFolder, PointClouds, UnusableFile
from aft_mm.structures import SequenceSample

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


def names(dataset, key='img_path'):
    return [dataset.get_data_info(i)[key].rpartition('/')[2] for i in range(len(dataset))]


class TestCelebA:
    @pytest.mark.parametrize(
        ('split', 'expected'),
        [('train', ['a.jpg', 'c.jpg', 'e.jpg']), ('val', ['d.jpg']), ('test', ['b.jpg'])],
    )
    def test_the_list_says_which_images_belong_to_a_split(self, celeba, split, expected):
        dataset = DATASETS.build(dict(type='aft_mm.CelebA', data_root=str(celeba), split=split))
        assert names(dataset) == expected
        assert dataset.test_mode == (split != 'train')
        assert CelebA(str(celeba), split, test_mode=split == 'train').test_mode == (
            split == 'train'
        )

    @pytest.mark.parametrize('name', ['list_eval_partition.txt', 'img_align_celeba'])
    def test_a_missing_part_is_named(self, celeba, name):
        (celeba / name).rename(celeba / 'elsewhere')
        with pytest.raises(
            FileNotFoundError,
            match=f'{celeba}/{name} of CelebA does not exist: '
            r'point data_root \(or AFT_MM_DATA\)',
        ):
            CelebA(str(celeba))

    def test_missing_images_are_counted(self, celeba):
        for name in 'ce':
            (celeba / f'img_align_celeba/{name}.jpg').unlink()
        with pytest.raises(
            FileNotFoundError,
            match='lacks 2 of the 3 images that list_eval_partiti'
            'on.txt lists in the train split, the first is c.jpg',
        ):
            CelebA(str(celeba))
        assert len(CelebA(str(celeba), 'val')) == 1

    @pytest.mark.parametrize('line', ['a.jpg 3', 'a.jpg', 'a.jpg 0 1', ''])
    def test_a_line_that_says_something_else_is_named(self, celeba, line):
        lines = [*LINES[:2], line, *LINES[2:]]
        (celeba / 'list_eval_partition.txt').write_text('\n'.join(lines))
        with pytest.raises(
            ValueError,
            match=r'line 3 of .*list_eval_partition.txt must be the name'
            f'.*, got {line!r}',
        ):
            CelebA(str(celeba))

    def test_an_empty_and_an_unknown_split_are_refused(self, celeba):
        (celeba / 'list_eval_partition.txt').write_text('a.jpg 0\n')
        with pytest.raises(ValueError, match='has no image of the val split of CelebA'):
            CelebA(str(celeba), 'val')
        with pytest.raises(ValueError, match="split must be one of train, val, test, got 'x'"):
            CelebA(str(celeba), 'x')

    def test_data_pack(self, shared_data):
        root = shared_data / 'celeba'
        if not root.is_dir():
            pytest.skip(f'the celeba pack is not at {shared_data}')
        pipeline = [
            dict(type='aft_mm.LoadRGBImage'),
            dict(type='aft_mm.SuperResolutionPair', crop_size=138),
            dict(type='aft_mm.PackSequence', image_shape=(32, 32, 3), tokens='pixels'),
        ]
        sizes = {split: len(CelebA(str(root), split)) for split in ('train', 'val', 'test')}
        assert sizes == dict(train=800, val=120, test=120)
        dataset = CelebA(str(root), 'test', pipeline=pipeline)
        for index in range(0, 120, 17):
            sample = dataset[index]
            target = sample['inputs'].view(8, 4, 8, 4, 3).float().mean((1, 3))
            source = sample['data_samples'].source.view(8, 8, 3)
            assert (target - source).abs().max() <= 0.5


class TestImageFolder:
    def test_every_image_below_the_folder_in_order(self, tmp_path):
        for name in ('b/2.PNG', 'b/10.jpeg', 'a.webp', 'c/d/e.jpg', 'b/notes.txt'):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        dataset = ImageFolder(str(tmp_path))
        assert names(dataset) == ['a.webp', '10.jpeg', '2.PNG', 'e.jpg']
        assert not dataset.test_mode

    def test_a_missing_and_an_empty_folder_are_named(self, tmp_path):
        with pytest.raises(
            ValueError, match=rf"data_root '{tmp_path}' contains no image file \(.bmp"
        ):
            ImageFolder(str(tmp_path))
        with pytest.raises(FileNotFoundError, match="data_root '.*/no' is not a folder"):
            ImageFolder(str(tmp_path / 'no'))


class TestPointClouds:
    @pytest.fixture
    def root(self, tmp_path):
        """Chairs by synset, cars and a class of our own by name."""
        for name in (
            '03001627/train/b.npy',
            '03001627/train/a.npy',
            '03001627/val/c.npy',
            'car/train/d.pcd',
            'car/train/notes.txt',
            'teapot/train/e.ply',
            'splits/list.txt',
        ):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return tmp_path

    @pytest.mark.parametrize(
        ('classes', 'split', 'files', 'labels'),
        [
            (('chair',), 'train', ['a.npy', 'b.npy'], ['chair'] * 2),
            ('03001627', 'val', ['c.npy'], ['chair']),
            (['teapot', 'car'], 'train', ['e.ply', 'd.pcd'], ['teapot', 'car']),
            (
                'all',
                'train',
                ['a.npy', 'b.npy', 'd.pcd', 'e.ply'],
                ['chair', 'chair', 'car', 'teapot'],
            ),
            ('all', 'val', ['c.npy'], ['chair']),
            (3001627, 'val', ['c.npy'], ['chair']),
        ],
    )
    def test_classes_are_folders_or_classes_of_shapenet(self, root, classes, split, files, labels):
        dataset = DATASETS.build(
            dict(type='aft_mm.PointClouds', data_root=str(root), classes=classes, split=split)
        )
        assert names(dataset, 'points_path') == files
        assert names(dataset, 'class_name') == labels
        assert dataset.test_mode == (split != 'train')

    @pytest.mark.parametrize(
        ('classes', 'split', 'message'),
        [
            (
                'boat',
                'train',
                r"class 'boat' has no folder in data_root '.*', which has 03001627, car",
            ),
            ('airplane', 'train', "class 'airplane' has no folder in data_root"),
            ('all', 'test', r"data_root '.*' has no folder <class>/test"),
            (
                'car',
                'val',
                r"class 'car' has no point cloud \(.npy, .pcd, .ply, .pts, .xyz\) in "
                "'.*/car/val'",
            ),
        ],
    )
    def test_a_class_that_is_empty_or_missing_is_named(self, root, classes, split, message):
        with pytest.raises((FileNotFoundError, ValueError), match=message) as error:
            PointClouds(str(root), classes, split)
        assert '\n' not in str(error.value)

    def test_meshes_are_for_the_converter(self, tmp_path):
        (tmp_path / 'desk/train').mkdir(parents=True)
        (tmp_path / 'desk/train/a.off').touch()
        with pytest.raises(
            ValueError,
            match='it has meshes, which tools/dataset_converters/shapene'
            't.py turns into point clouds',
        ):
            PointClouds(str(tmp_path))
        with pytest.raises(FileNotFoundError, match='is not a folder'):
            PointClouds(str(tmp_path / 'no'))

    def test_the_classes_of_shapenet_part(self, shared_data):
        root = shared_data / 'shapenet_part_sample'
        if not root.is_dir():
            pytest.skip(f'the shapenet_part_sample pack is not at {shared_data}')
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
        with pytest.raises(
            ValueError,
            match=r'^20 files in a row cannot be used, the last one: '
            r'file \d is damaged\.$',
        ):
            Numbers(set(range(10)))[0]

    def test_other_errors_are_not_swallowed(self):
        dataset = Numbers(())
        dataset.pipeline.transforms.append(lambda results: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dataset[0]
