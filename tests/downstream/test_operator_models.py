"""Parts of mmdet and mmseg that use operators of mmcv, forwards and backwards."""

import re

import torch
from mmdet.models.backbones import DetectoRS_ResNet, ResNet
from mmdet.models.dense_heads import RepPointsHead
from mmdet.models.dense_heads.guided_anchor_head import FeatureAdaption
from mmdet.models.layers import MSDeformAttnPixelDecoder
from mmdet.models.necks import DyHead
from mmengine.config import ConfigDict
from mmengine.registry import init_default_scope
from mmseg.models.decode_heads import CCHead, PSAHead

from ..helpers import each

STAGES = dict(depth=50, base_channels=8, out_indices=(1, 2, 3), norm_eval=False)
WITH_DCN = dict(stage_with_dcn=(False, True, True, True))
SEGMENTS = dict(in_channels=16, channels=8, num_classes=3)
IMAGE = [torch.randn(2, 3, 128, 160)]


def maps(channels, *sizes):
    return [torch.randn(2, channels, size, size + 1) for size in sizes]


def offsets_at_first(convolution):
    return ResNet(**STAGES, dcn=dict(type=convolution, deform_groups=1), **WITH_DCN), IMAGE


def pixel_decoder():
    encoder = ConfigDict(
        num_layers=1,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=16, num_heads=2, num_levels=3, batch_first=True),
            ffn_cfg=dict(embed_dims=16, feedforward_channels=16),
        ),
    )
    layer = MSDeformAttnPixelDecoder(
        in_channels=[8, 8, 8, 8],
        strides=[4, 8, 16, 32],
        feat_channels=16,
        out_channels=16,
        norm_cfg=dict(type='GN', num_groups=2),
        encoder=encoder,
        positional_encoding=dict(num_feats=8, normalize=True),
    )
    return layer, [maps(8, 16, 8, 4, 2)]


#: A part and its inputs.
CASES = {
    # Levels take the offsets of the finer one, which are larger than their output.
    'DyHead': lambda: (DyHead(16, 16, 2), [maps(16, 8, 4, 2)]),
    'DCN': lambda: offsets_at_first('DCN'),
    'DCNv2': lambda: offsets_at_first('DCNv2'),
    'SAC': lambda: (
        DetectoRS_ResNet(
            **STAGES,
            sac=dict(type='SAC', use_deform=True),
            stage_with_sac=(False, True, True, True),
            conv_cfg=dict(type='ConvAWS'),
        ),
        IMAGE,
    ),
    'RepPoints': lambda: (
        RepPointsHead(3, 16, feat_channels=16, point_feat_channels=16),
        [maps(16, 8, 4, 2)],
    ),
    'guided anchors': lambda: (FeatureAdaption(16, 16), [maps(16, 7)[0], maps(2, 7)[0]]),
    'deformable attention': pixel_decoder,
    'PSA': lambda: (PSAHead(mask_size=(5, 6), **SEGMENTS), [maps(16, 5)]),
    'criss-cross': lambda: (CCHead(recurrence=2, **SEGMENTS), [maps(16, 5)]),
}


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [x for part in value if part is not None for x in tensors(part)]


@each('case', CASES)
def test_a_part_runs_forwards_and_backwards(case):
    init_default_scope('mmdet')
    layer, inputs = CASES[case]()
    layer.train()
    outputs = tensors(layer(*inputs))
    assert outputs and all(x.isfinite().all() for x in outputs)
    sum(x.square().sum() for x in outputs).backward()
    grads = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert all(grad.isfinite().all() for grad in grads.values())
    # The switch of SAC starts at 1, which leaves out offset_l.
    offsets = [grads[name] for name in grads if re.search(r'offset(?!_l\b).*weight$', name)]
    assert grads and all(grad.any() for grad in offsets), grads.keys()
