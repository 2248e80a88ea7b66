"""Maps and class weights that do not fit the heads of a detector or segmentor are refused."""

import copy
import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.hub import get_config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData, PixelData
from mmseg.structures import SegDataSample

from aft_mm.engine.preflight import (
    TRAIN_CHECKS,
    check_class_weights,
    check_strides,
    check_widths,
    declared_strides,
)

from ..all_configs import configs_of, load_config
from ..errors import refuses_input
from ..helpers import each, nightly

RETINANET = 'retinanet-aft-conv-mini_1xb4-24e_bccd'
MASK_RCNN = 'mask-rcnn-aft-conv-mini_1xb4-160e-person_coco-mini'
UPERNET = 'upernet-aft-conv-mini_1xb4-1200i_camvid'
SIZES = (96, 130), (61, 47), (64, 200)


def config_of(name):
    config = load_config(configs_of('detection')[name])
    init_default_scope(config.default_scope)
    return copy.deepcopy(config.model)


def with_fpn(name):
    """Return a model with mmdet's FPN on four layers of the plain backbone."""
    model = config_of(name)
    width, channels = model.backbone.arch.embed_dims, model.neck.out_channels
    model.backbone.out_indices = (0, 1, 2, 3)
    model.neck = dict(type='FPN', in_channels=[width] * 4, out_channels=channels, num_outs=4)
    return model


def checked(model):
    torch.manual_seed(0)
    model = MODELS.build(model)
    check_strides(None, SimpleNamespace(model=model))
    return model


def train(model, size=SIZES[0]):
    sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, scale_factor=(1, 1)))
    boxes = torch.tensor([[5.0, 6, 40, 44], [8, 9, 30, 40]])
    masks = BitmapMasks(np.ones((2, *size), np.uint8), *size)
    sample.gt_instances = InstanceData(bboxes=boxes, labels=torch.zeros(2).long(), masks=masks)
    data = dict(inputs=[torch.randint(256, (3, *size), dtype=torch.uint8)], data_samples=[sample])
    data = model.data_preprocessor(data, True)
    return model.loss(data['inputs'], data['data_samples'])


def test_the_check_runs_before_training():
    assert check_strides in TRAIN_CHECKS


@each('name, size', list(itertools.product([RETINANET, MASK_RCNN], SIZES)))
def test_a_simple_feature_pyramid_passes(name, size):
    assert train(checked(config_of(name)), size)


FOREIGN = ['solo/solo_r50_fpn_1x_coco', 'yolox/yolox_tiny_8xb8-300e_coco', 'ssd/ssd300_coco']
FOREIGN += ['guided_anchoring/ga-retinanet_r50_fpn_1x_coco', 'yolof/yolof_r50-c5_8xb8-1x_coco']
FOREIGN += ['condinst/condinst_r50_fpn_ms-poly-90k_coco_instance']  # a stride for five maps


@pytest.mark.parametrize('name', nightly(FOREIGN, FOREIGN[-1:]))
def test_models_of_mmdet_pass(name):
    """Heads with other maps, strides that are no powers of 2, and other names of the strides."""
    model = get_config(f'mmdet::{name}.py').model
    init_default_scope('mmdet')
    model.backbone.init_cfg = model.data_preprocessor.batch_augments = None
    model = checked(model)
    assert any(map(declared_strides, model.modules()))
    assert train(model, (300, 300) if 'ssd' in name else (256, 200))


def test_levels_of_one_size_are_refused():
    message = (
        r'model\.neck FPN gives bbox_head maps of strides 8, 8, 8, 8 px, which must be the strides '
        r'that it declares, 8, 16, 32, 64; after a backbone of one scale use the neck '
        r'aft_mm\.SimpleFeaturePyramid$'
    )
    refuses_input(message, train, checked(with_fpn(RETINANET)))
    refuses_input('FPN gives rpn_head maps of strides', train, checked(with_fpn(MASK_RCNN)))


@each(
    'settings, found',
    [
        (dict(strides=[4, 8, 16]), '4, 8, 16, 32'),
        (dict(num_outs=3), '8, 16, 32'),
        (dict(num_outs=5), '8, 16, 32, 64, 128'),
    ],
)
def test_levels_of_our_neck_that_the_head_does_not_declare(settings, found):
    model = config_of(RETINANET)
    model.neck.update(settings)
    message = f'maps of strides {found} px, .* declares, 8, 16, 32, 64; set strides and num_outs of'
    refuses_input(message, train, checked(model), (128, 256))


@each(
    'part, settings, message',
    [
        ('neck', dict(in_channels=[96]), 'entry for each of the 4 out_indices of the backbone'),
        ('decode_head', dict(in_index=[0, 1, 2, 4]), 'below 4, the number of maps of the neck'),
        ('auxiliary_head', dict(in_index=-5), 'below 4, the number of maps of the neck, got -5'),
    ],
)
def test_parts_of_a_segmentor_with_other_numbers_of_maps(part, settings, message):
    config = load_config(configs_of('segmentation')[UPERNET])
    init_default_scope(config.default_scope)
    model = copy.deepcopy(config.model)
    check_widths(None, SimpleNamespace(model=MODELS.build(copy.deepcopy(model))))
    model[part].update(settings)
    refuses_input(message, check_widths, None, SimpleNamespace(model=MODELS.build(model)))


def train_segmentor(model):
    """Without padding: with class weights, mmseg fails at a pixel without a class."""
    sample = SegDataSample(metainfo=dict(img_shape=(64, 64)))
    sample.gt_sem_seg = PixelData(data=torch.randint(2, (1, 64, 64)))
    return model.loss(torch.ones(1, 4, 64, 64), [sample])


ONE_CHANNEL = dict(num_classes=2, out_channels=1, threshold=0.5)


@each(
    'task, name, head, settings, right',
    [
        ('detection', RETINANET, 'bbox_head', dict(loss_cls=dict(use_sigmoid=True)), {1, 3}),
        ('detection', RETINANET, 'bbox_head', dict(loss_cls=dict(use_sigmoid=False)), {4}),
        ('detection', MASK_RCNN, 'roi_head.bbox_head', dict(num_classes=3), {4}),
        ('segmentation', UPERNET, 'decode_head', dict(num_classes=3), {3}),
        ('segmentation', UPERNET, 'auxiliary_head', ONE_CHANNEL, {1}),
    ],
)
def test_class_weights_are_refused_where_the_host_cannot_use_them(
    task, name, head, settings, right
):
    config = load_config(configs_of(task)[name])
    init_default_scope(config.default_scope)
    model, loss = copy.deepcopy(config.model), 'loss_cls' if task == 'detection' else 'loss_decode'
    part = model
    for key in head.split('.'):
        part = part[key]
    part.update(copy.deepcopy(settings))
    part[loss] = dict(type='CrossEntropyLoss', **settings.get(loss, {}))
    if 'out_channels' in settings:
        part[loss].update(use_sigmoid=True)
    torch.manual_seed(0)
    model = MODELS.build(model).eval()  # one image is too few for the batch norms of mmseg
    assert check_class_weights in TRAIN_CHECKS
    for number in (1, 2, 3, 4, 5):
        model.get_submodule(f'{head}.{loss}').class_weight = [0.5] * number
        check = functools.partial(check_class_weights, None, SimpleNamespace(model=model))
        lose = functools.partial(train if task == 'detection' else train_segmentor, model)
        if number in right:
            check(), lose()
            continue
        refuses_input(f'in model.{head} must have {max(right)} values, one per class', check)
        with pytest.raises(RuntimeError):
            lose()


@each('head', ['FCOSHead', 'ATSSHead', 'RepPointsHead', 'YOLOXHead'])
def test_other_heads_refuse_them(head):
    model = with_fpn(RETINANET)
    options = dict(type=head, num_classes=3, in_channels=96, feat_channels=96)
    if head == 'ATSSHead':
        options['anchor_generator'] = model.bbox_head.anchor_generator
    else:
        options['point_strides' if 'RepPoints' in head else 'strides'] = [8, 16, 32, 64]
    if head == 'RepPointsHead':
        options['point_feat_channels'] = 96
    if head == 'FCOSHead':
        options['regress_ranges'] = ((-1, 64), (64, 128), (128, 256), (256, 1e8))
    model.bbox_head = options
    model.pop('train_cfg'), model.pop('test_cfg')
    refuses_input(
        'bbox_head maps of strides 8, 8, 8, 8 px.* declares, 8, 16', train, checked(model)
    )


@each('part', ['bbox', 'mask'])
def test_a_region_extractor_refuses_them(part):
    model = config_of(MASK_RCNN)
    model.roi_head[f'{part}_roi_extractor'].featmap_strides = [4, 8, 16]
    refuses_input(f'roi_head.{part}_roi_extractor maps of strides 8, 16', train, checked(model))
