"""Padded batches in the models of mmdet and mmseg."""

import pytest
import torch
from mmdet.structures import DetDataSample
from mmengine.registry import MODELS
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import nn

from ..all_configs import configs_of, load_config

CONFIGS = configs_of('detection', 'segmentation')
SIZES = [(93, 118), (64, 201), (110, 40)]


def sample_of(image, task):
    size = image.shape[1:]
    sample = DetDataSample() if task == 'detection' else SegDataSample()
    sample.set_metainfo(dict(img_shape=size, ori_shape=size))
    if task == 'segmentation':
        sample.gt_sem_seg = PixelData(data=torch.zeros(1, *size, dtype=torch.long))
    return sample


def random_model(config):
    model = MODELS.build(config).eval()
    for parameter in model.backbone.parameters():  # far from 0, which shows any influence
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize(
    'name',
    [
        'mask-rcnn-aft-conv-mini_1xb4-160e-person_coco-mini',
        'retinanet-aft-conv-mini_1xb4-24e_bccd',
        'retinanet-aft-conv-mini_1xb4-24e-conv-stem_bccd',
        'upernet-aft-conv-mini_1xb4-1200i_camvid',
    ],
)
def test_features_do_not_depend_on_padding(name):
    task = CONFIGS[name].parent.name
    model = random_model(load_config(CONFIGS[name]).model)
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in SIZES]

    def features(pictures, hide=True):
        batch = model.data_preprocessor(
            dict(inputs=pictures, data_samples=[sample_of(image, task) for image in pictures]),
            training=task == 'segmentation',
        )  # where mmseg pads to the size of the crops
        if not hide:
            batch['inputs'][:, -1] = 1
        with torch.no_grad():
            return model.backbone(batch['inputs'])

    together, leaking = features(images), features(images, hide=False)
    differences = []
    for i, image in enumerate(images):
        height, width = (-(-n // 8) for n in image.shape[1:])
        for level, alone in enumerate(features([image])):
            inside = (slice(None), slice(height), slice(width))
            torch.testing.assert_close(
                together[level][i][inside], alone[0][inside], rtol=1e-4, atol=1e-4
            )
            assert not together[level][i, :, height:].any()
            assert not together[level][i, :, :, width:].any()
            differences.append((leaking[level][i][inside] - alone[0][inside]).abs().max())
    assert max(differences) > 1e-2  # without the mask the padding has an influence
