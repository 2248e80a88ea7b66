"""The configs for own boxes and masks, each trained briefly."""

import json

import numpy as np
import pytest
from mmengine.config import Config

from aft_mm.analysis.run_logs import read_scalars
from aft_mm.config.reading import check_data
from aft_mm.errors import UserError

from ..all_configs import ROOT
from ..documents import blocks
from ..errors import refuses_input
from ..helpers import WITHOUT_WORKERS, save_picture

pytestmark = pytest.mark.usefixtures('here')
FOLDER = ROOT / 'configs/own_data'
RNG = np.random.default_rng(0)
XML = """<annotation><size><width>96</width><height>64</height><depth>3</depth></size>
<object><name>dog</name><difficult>0</difficult>
<bndbox><xmin>9</xmin><ymin>5</ymin><xmax>50</xmax><ymax>44</ymax></bndbox></object></annotation>"""


def boxes_as_json(data):
    size, box = dict(width=96, height=64), dict(bbox=[8, 4, 41, 39], area=41 * 39, iscrowd=0)
    whole = dict(
        images=[dict(size, id=i, file_name=f'{i}.jpg') for i in range(4)],
        annotations=[dict(box, id=i + 1, image_id=i, category_id=7) for i in range(4)],
        categories=[dict(id=3, name='cat'), dict(id=7, name='dog')],
    )
    for number in range(4):
        save_picture(data / f'my_boxes/images/{number}.jpg', RNG.integers(0, 256, (64, 96, 3)))
    for part in ('train', 'val'):
        (data / f'my_boxes/{part}.json').write_text(json.dumps(whole))


def boxes_as_xml(data):
    (data / 'my_boxes/ImageSets/Main').mkdir(parents=True)
    (data / 'my_boxes/Annotations').mkdir()
    for part in ('train', 'val'):
        (data / f'my_boxes/ImageSets/Main/{part}.txt').write_text('0\n1\n2\n3')
    for number in range(4):
        save_picture(data / f'my_boxes/JPEGImages/{number}.jpg', RNG.integers(0, 256, (64, 96, 3)))
        (data / f'my_boxes/Annotations/{number}.xml').write_text(XML)


def masks(data):
    for part in ('train', 'val'):
        for number in range(4):
            save_picture(data / f'my_masks/{part}/{number}.jpg', RNG.integers(0, 256, (64, 96, 3)))
            save_picture(
                data / f'my_masks/{part}_masks/{number}.png', RNG.choice([0, 1, 2, 255], (64, 96))
            )


EPOCH = ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1', 'param_scheduler=None']
# After one epoch no score is that high, and then mmdet logs no metric.
LOW = [*EPOCH, 'model.test_cfg.score_thr=0.0']
TWO = ['train_cfg.max_iters=2', 'train_cfg.val_interval=2']


@pytest.mark.parametrize(
    ('kind', 'name', 'write', 'length', 'metric'),
    [
        ('coco', 'my_boxes', boxes_as_json, LOW, 'coco/bbox_mAP'),
        ('voc', 'my_boxes', boxes_as_xml, EPOCH, 'pascal_voc/mAP'),
        ('masks', 'my_masks', masks, TWO, 'mIoU'),
    ],
)
def test_the_new_config_trains(kind, name, write, length, metric, tool, tmp_path, capfd):
    write(tmp_path / 'data')
    tool('new').main([kind, f'data/{name}', '--out', 'my.py'])
    options = ['default_hooks.logger.interval=1', f'visualizer.name={kind}', *length]
    tool('browse').main(['my.py', '--split', 'val', '--num', '2', '--out', 'samples.png'])
    tool('train').main(['my.py', '--work-dir', 'work', '--cfg-options', *options, *WITHOUT_WORKERS])
    shown = capfd.readouterr().out
    assert 'loading annotations' not in shown and 'Running per image' not in shown
    config = 'work/my.py' if length is LOW else 'my.py'  # with the option of the model
    assert f'next       aft_mm predict {config} work/' in shown
    records = read_scalars('work')
    assert any(metric in record for record in records)
    assert any(record.get('loss', 0) > 0 for record in records)


# The config that they inherit is built in test_configs.py.
@pytest.mark.nightly
@pytest.mark.parametrize(
    ('number', 'options'),
    [
        (1, [*LOW, 'train_dataloader.dataset.pipeline.2.scale=(96,64)']),
        (2, [*TWO, 'train_dataloader.batch_size=1', 'param_scheduler=None']),
    ],
)
def test_the_configs_of_the_guide_train(number, options, tool, tmp_path, capfd):
    boxes_as_json(tmp_path)
    for part in ('training', 'validation'):
        folder = tmp_path / 'data/ade/ADEChallengeData2016'
        save_picture(folder / f'images/{part}/0.jpg', RNG.integers(0, 256, (64, 96, 3)))
        save_picture(folder / f'annotations/{part}/0.png', RNG.integers(0, 151, (64, 96)))
    examples = blocks('docs/tasks/dense_prediction.md', 'python')
    (tmp_path / 'detector.py').write_text(examples[0])
    (tmp_path / 'mine.py').write_text(examples[number])
    options += ['default_hooks.logger.interval=1', f'visualizer.name=guide{number}']
    tool('train').main(
        ['mine.py', '--work-dir', 'work', '--cfg-options', *options, *WITHOUT_WORKERS]
    )
    records = read_scalars('work')
    assert records[0]['loss'] > 0
    assert ('coco/bbox_mAP' if number == 1 else 'mIoU') in records[-1]


@pytest.mark.parametrize(
    ('kind', 'write', 'classes', 'message'),
    [
        # mmdet would name dogs birds, name cats dogs, or find no box.
        ('coco-json', boxes_as_json, ('bird', 'dog'), 'must be categories of .*order.*: cat, dog'),
        ('coco-json', boxes_as_json, ('dog', 'cat'), 'must be categories of .*order.*: cat, dog'),
        ('voc-xml', boxes_as_xml, ('cat', 'Dog'), 'boxes of .*train.txt. are of .* classes: dog'),
        ('coco-json', boxes_as_json, ('dog',), None),
        ('voc-xml', boxes_as_xml, ('dog', 'bird'), None),
    ],
)
def test_classes_that_do_not_match_the_annotations_are_refused(
    kind, write, classes, message, tmp_path
):
    write(tmp_path / 'data')
    (path,) = FOLDER.glob(f'*{kind}.py')
    config = Config.fromfile(path)
    config.train_dataloader.dataset.metainfo.classes = classes
    if message is None:
        check_data(config, 'train')
        return
    with pytest.raises(UserError, match=f'metainfo.classes lists {", ".join(classes)}.*{message}'):
        check_data(config, 'train')


def test_boxes_without_names_are_those_of_coco(tmp_path):
    boxes_as_json(tmp_path / 'data')
    (path,) = FOLDER.glob('*coco-json.py')
    config = Config.fromfile(path)
    del config.train_dataloader.dataset['metainfo']
    check_data(config, 'train')  # cat and dog are
    for place in (tmp_path / 'data/my_boxes').glob('*.json'):
        text = place.read_text().replace('"cat"', '"cell"').replace('"dog"', '"nucleus"')
        place.write_text(text)
    with pytest.raises(UserError, match=r"set metainfo=dict.classes=\('cell', 'nucleus'\)\)$"):
        check_data(config, 'train')


@pytest.mark.parametrize(
    ('mask', 'message'),
    [
        (np.full((64, 96), 3), 'has the value 3, which must be 0 to 2, .*, or 255, .* to 3$'),
        (np.zeros((64, 96, 3)), "must have one class number of 8 bits per pixel, got mode 'RGB'"),
        (np.zeros((96, 64)), 'must have the size of its image, 96 x 64, got 64 x 96'),
        (None, 'cannot be read: No such file'),
    ],
)
def test_masks_are_checked_before_a_training(mask, message, tmp_path):
    masks(tmp_path / 'data')
    (path,) = FOLDER.glob('*mask-png.py')
    config = Config.fromfile(path)
    check_data(config, 'train', 'val')
    place = tmp_path / 'data/my_masks/val_masks/2.png'
    place.unlink() if mask is None else save_picture(place, mask)
    check_data(config, 'train')
    refuses_input(f"mask '.*val_masks/2.png' {message}", check_data, config, 'val')
    config.val_dataloader.dataset.ann_file = str(tmp_path / 'list.txt')
    (tmp_path / 'list.txt').write_text('0\n1\n3\n')
    check_data(config, 'val')
