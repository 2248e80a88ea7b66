"""Boxes and masks of CamVid, compared with scipy and passed through mmdet's pipeline and metric."""

import cv2
import numpy as np
import pytest
import torch
from mmdet.evaluation import CocoMetric
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import init_default_scope
from PIL import Image
from pycocotools import mask as run_lengths
from scipy import ndimage

from aft_mm.datasets import CamVidObjects
from aft_mm.datasets.camvid_objects import LABELS

from ..all_configs import ROOT, load_config
from ..errors import refuses

LABEL = dict(road=3, car=8, bicyclist=10)
UNLABELLED = 11
CONFIG = next((ROOT / 'configs/detection').glob('mask-rcnn-aft-conv-mini_*_camvid-objects.py'))


def patches(seed, height=67, width=93):
    """Return labels in patches of 1 to 9 pixels, with regions that touch at sides and corners."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, UNLABELLED + 1, (height, width), dtype=np.uint8)
    for size in (3, 9):
        coarse = rng.integers(0, UNLABELLED + 1, (-(-height // size), -(-width // size)))
        spread = coarse.repeat(size, 0).repeat(size, 1)[:height, :width]
        labels = np.where(rng.random(labels.shape) < 0.7, spread, labels)
    return labels.astype(np.uint8)


@pytest.fixture
def root(tmp_path):
    for split, count in dict(train=3, val=1).items():
        (tmp_path / split).mkdir()
        (tmp_path / f'{split}annot').mkdir()
        for number in range(count):
            save(tmp_path, split, f'frame{number}', patches(number))
    return tmp_path


def save(root, split, name, labels):
    noise = np.random.default_rng(0).integers(0, 256, (*labels.shape, 3), dtype=np.uint8)
    Image.fromarray(noise).save(root / split / f'{name}.jpg')
    Image.fromarray(labels).save(root / f'{split}annot' / f'{name}.png')


def objects(root, **kwargs):
    return CamVidObjects(data_root=str(root), **kwargs)


def in_order(found):
    return sorted(found, key=lambda it: (it[0], it[1], it[2].tolist()))


@pytest.mark.parametrize('classes', [('car',), ('bicyclist', 'road', 'car')])
def test_objects_are_the_connected_regions_of_scipy(root, classes):
    dataset = objects(root, metainfo=dict(classes=classes), min_area=20)
    assert len(dataset) == 3
    for number in range(3):
        found = dataset.get_data_info(number)['instances']
        labels, expected = patches(number), []
        for index, name in enumerate(classes):
            regions, _ = ndimage.label(labels == LABEL[name], np.ones((3, 3)))
            for region, (rows, columns) in enumerate(ndimage.find_objects(regions), start=1):
                box = [columns.start, rows.start, columns.stop, rows.stop]
                expected.append((index, box, regions == region))
        assert len(found) == len(expected) > 20
        decoded = [
            (it['bbox_label'], it['bbox'], run_lengths.decode(it['mask']) > 0) for it in found
        ]
        for got, wanted in zip(in_order(decoded), in_order(expected), strict=True):
            assert got[:2] == wanted[:2]
            np.testing.assert_array_equal(got[2], wanted[2])
        ignored = sum(it['ignore_flag'] for it in found)
        assert ignored == sum(mask.sum() < 20 for *_, mask in expected) > 0


def test_classes_are_three_unless_given(root):
    dataset = objects(root)
    assert dataset.metainfo['classes'] == ('car', 'pedestrian', 'bicyclist')
    labels = {it['bbox_label'] for it in dataset.get_data_info(0)['instances']}
    assert labels == {0, 1, 2}


def test_frames_without_objects_are_included_and_other_files_are_not(root):
    save(root, 'val', 'empty', np.full((67, 93), UNLABELLED, np.uint8))
    (root / 'val/notes.txt').write_text('a note')
    dataset = objects(root, split='val')
    assert len(dataset) == 2
    assert [len(dataset.get_data_info(i)['instances']) > 0 for i in range(2)] == [False, True]


def test_labels_and_colours_are_those_of_the_segmentors(root):
    meta = Config.fromfile(ROOT / 'configs/_base_/datasets/camvid.py').metainfo
    own = objects(root, metainfo=dict(classes=meta['classes'])).metainfo
    assert LABELS == meta['classes']
    assert own['palette'] == [tuple(colour) for colour in meta['palette']]


@pytest.mark.parametrize('classes', [('car',), ('bicyclist', 'road', 'car', 'sky')])
def test_every_class_has_its_colour(root, classes):
    colours = dict(car=(64, 0, 128), bicyclist=(0, 128, 192), road=(128, 64, 128), sky=(128,) * 3)
    meta = objects(root, metainfo=dict(classes=classes)).metainfo
    assert meta['palette'] == [colours[name] for name in classes]
    own = dict(classes=classes, palette=[(1, 2, 3)] * len(classes))
    assert objects(root, metainfo=own).metainfo['palette'] == own['palette']


@pytest.mark.parametrize('damaged', ['trainannot/frame2.png', 'train/frame2.jpg'])
def test_a_damaged_file_is_named(root, damaged):
    (root / damaged).write_bytes((root / damaged).read_bytes()[:9])
    refuses(r'frame2\..* of CamVid cannot be read: it is damaged', objects, root)


@pytest.mark.parametrize(
    ('labels', 'message'),
    [
        (np.zeros((67, 92)), r'frame2\.png must have the size of .* 93 x 67, got 92 x 67'),
        (np.full((67, 93), 12), r'frame2\.png must contain one label per pixel, 0 to 11'),
        (np.zeros((9, 9, 3)), r'frame2\.png must contain one label per pixel, 0 to 11'),
    ],
)
def test_other_labels_are_refused(root, labels, message):
    Image.fromarray(labels.astype(np.uint8)).save(root / 'trainannot/frame2.png')
    refuses(message, objects, root)


def test_missing_files_folders_and_classes_are_named(root):
    with pytest.raises(ValueError, match='classes of metainfo must be among .*got lorry, tram'):
        objects(root, metainfo=dict(classes=('tram', 'car', 'lorry')))
    with pytest.raises(FileNotFoundError, match='nights of CamVid does not exist'):
        objects(root, split='nights')
    (root / 'trainannot/frame1.png').unlink()
    with pytest.raises(FileNotFoundError, match=r'frame1\.png does not exist: every frame of Cam'):
        objects(root)
    (root / 'val/frame0.jpg').unlink()
    refuses(r'val of CamVid contains no image file \(\.bmp', objects, root, split='val')


@pytest.fixture
def split_of(pack):
    def build(split):
        config = load_config(CONFIG)
        init_default_scope(config.default_scope)
        dataset = dict(config[f'{split}_dataloader'].dataset, data_root=str(pack('camvid')))
        pipeline = Compose(dataset.pop('pipeline'))
        dataset.pop('type')
        return CamVidObjects(**dataset), pipeline

    return build


def test_ground_truth_as_prediction_has_an_average_precision_of_one(split_of):
    dataset, pipeline = split_of('test')
    metric = CocoMetric(metric=['bbox', 'segm'])
    metric.dataset_meta = dataset.metainfo
    for number in range(len(dataset)):
        sample = pipeline(dataset.get_data_info(number))['data_samples']
        truth, result = sample.gt_instances, sample.to_dict()
        result['pred_instances'] = dict(
            bboxes=truth.bboxes.tensor,
            labels=truth.labels,
            scores=torch.ones(len(truth)),
            masks=truth.masks.to_tensor(torch.bool, 'cpu'),
        )
        metric.process({}, [result])
    metrics = metric.evaluate(len(dataset))
    assert metrics['coco/bbox_mAP'] == metrics['coco/segm_mAP'] == 1.0


def test_image_boxes_and_masks_of_training_are_resized_and_flipped_together(split_of):
    dataset, pipeline = split_of('train')
    flips, checked = set(), 0
    for number in range(0, len(dataset), 5):
        frame = dataset.get_data_info(number)
        packed = pipeline(dataset.get_data_info(number))
        sample = packed['data_samples']
        height, width = sample.img_shape
        turn = slice(None, None, -1 if sample.flip else 1)
        flips.add(sample.flip)

        image = cv2.resize(cv2.imread(frame['img_path']), (width, height))[:, turn]
        np.testing.assert_array_equal(packed['inputs'].permute(1, 2, 0), image)
        wanted = [it for it in frame['instances'] if not it['ignore_flag']]
        found = sample.gt_instances
        for it, box, mask in zip(wanted, found.bboxes.tensor, found.masks.masks, strict=True):
            x1, y1, x2, y2 = it['bbox'] * np.tile(sample.scale_factor, 2)
            ends = (width - x2, width - x1) if sample.flip else (x1, x2)
            np.testing.assert_allclose(box, [ends[0], y1, ends[1], y2], atol=0.01)
            own = run_lengths.decode(it['mask'])
            expected = cv2.resize(own, (width, height), interpolation=cv2.INTER_NEAREST)[:, turn]
            np.testing.assert_array_equal(mask, expected)
            checked += 1
    assert flips == {False, True} and checked > 10
