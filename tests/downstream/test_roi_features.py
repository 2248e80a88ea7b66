"""mmcv's RoIAlign on our maps, compared with torchvision's, which supports any strides."""

import pytest
import torch
from mmdet.structures.bbox import bbox2roi
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torchvision.ops import roi_align

from ..all_configs import configs_of, load_config

MASK_RCNN = [name for name in configs_of('detection') if name.startswith('mask-rcnn')]
FPN = dict(type='mmdet.FPN', in_channels=[96] * 2, out_channels=16, num_outs=2)


def model_of(name):
    config = load_config(configs_of('detection')[name])
    init_default_scope(config.default_scope)
    torch.manual_seed(0)
    return MODELS.build(config.model).eval()


def boxes(height, width, count=9):
    start = torch.rand(count, 2) * torch.tensor([width, height]) * 0.6
    return torch.cat([start, start + 12 + torch.rand(count, 2) * 60], dim=1)


@torch.no_grad()
def assert_read_as_torchvision_reads(layers, maps):
    rois = bbox2roi([boxes(93, 118), boxes(93, 118)])
    for layer, x in zip(layers, maps, strict=True):
        expected = roi_align(
            x, rois, layer.output_size, layer.spatial_scale, layer.sampling_ratio, layer.aligned
        )
        assert expected.std() > 1e-3
        torch.testing.assert_close(layer(x, rois), expected)


@pytest.mark.parametrize('name', MASK_RCNN)
def test_mask_rcnn_pools_features_at_its_boxes(name):
    model = model_of(name)
    with torch.no_grad():
        maps = model.neck(model.backbone(torch.randn(2, 4, 93, 118)))
    for extractor in (model.roi_head.bbox_roi_extractor, model.roi_head.mask_roi_extractor):
        layers = extractor.roi_layers
        assert_read_as_torchvision_reads(layers, maps[: len(layers)])


def test_mask_rcnn_pools_features_at_its_boxes_after_an_fpn():
    model = model_of(next(name for name in MASK_RCNN if '-mini_' in name))
    for parameter in model.backbone.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.backbone.out_indices = (2, 4)
    neck = MODELS.build(FPN)
    layers = model.roi_head.bbox_roi_extractor.roi_layers[:2]
    with torch.no_grad():
        maps = model.backbone(torch.randn(2, 4, 93, 118))
        for read in (maps, neck(maps)):
            assert_read_as_torchvision_reads(layers, read)
