"""Each operator of mmcv that configs of mmdet and mmseg use, with our extension, forwards and backwards."""

import json

import pytest
import torch
from mmcv import ops
from mmcv.ops import merge_cells

from aft_mm.hosts import selected_operators

from ..helpers import ROOT, each


def recorded():
    for line in (ROOT / 'docs/results/benchmarks/hosts.jsonl').read_text().splitlines():
        record = json.loads(line)
        if record['name'] == 'model_zoo_operators':
            return {
                name
                for library in ('mmdet', 'mmseg')
                for name, use in record[library]['operators'].items()
                if use['supported']
            }
    return set()


def maps(*shape):
    return torch.randn(*shape, requires_grad=True)


def run(function, *inputs):
    return function(*inputs), *inputs


def run_on_maps(layer, channels=4):
    return run(layer, maps(2, channels, 6, 7))


def attend():
    layer = ops.MultiScaleDeformableAttention(16, num_heads=2, num_levels=2)
    options = dict(
        reference_points=torch.rand(2, 26, 2, 2), spatial_shapes=torch.tensor([[4, 5], [2, 3]])
    )
    return run(
        lambda x: layer(x, level_start_index=torch.tensor([0, 20]), **options), maps(26, 2, 16)
    )


def suppress(function, *options):
    boxes = torch.tensor([[0.0, 0, 9, 9], [0, 0, 9, 8], [5, 5, 9, 9]], requires_grad=True)
    scores = torch.tensor([0.2, 0.9, 0.5], requires_grad=True)
    dets, kept = function(boxes, scores, *options)
    assert kept.tolist() == [1, 2]
    return dets, boxes, scores


ROIS = torch.tensor([[0, 0.0, 0, 5, 4], [1, 2, 1, 6, 6]])
SPLIT = dict(type='nms', iou_threshold=0.5, split_thr=2)

#: Functions that return an output and the inputs that get a gradient.
FAMILIES = {
    'nms.nms': lambda: suppress(ops.nms, 0.5),
    'nms.batched_nms': lambda: suppress(ops.batched_nms, torch.zeros(3), SPLIT),
    'roi_align.RoIAlign': lambda: run_on_maps(lambda x: ops.RoIAlign(3)(x, ROIS)),
    'deform_conv.DeformConv2d': lambda: run(
        ops.DeformConv2d(4, 4, 3), maps(2, 4, 6, 7), maps(2, 18, 4, 5)
    ),
    'modulated_deform_conv.ModulatedDeformConv2d': lambda: run(
        ops.ModulatedDeformConv2d(4, 4, 3), maps(2, 4, 6, 7), maps(2, 18, 4, 5), maps(2, 9, 4, 5)
    ),
    'deform_conv.DeformConv2dPack': lambda: run_on_maps(ops.DeformConv2dPack(4, 4, 3)),
    'modulated_deform_conv.ModulatedDeformConv2dPack': lambda: run_on_maps(
        ops.ModulatedDeformConv2dPack(4, 4, 3)
    ),
    'saconv.SAConv2d': lambda: run_on_maps(ops.SAConv2d(4, 4, 3, padding=1, use_deform=True)),
    'multi_scale_deform_attn.MultiScaleDeformableAttention': attend,
    'masked_conv.MaskedConv2d': lambda: run_on_maps(ops.MaskedConv2d(4, 4, 3)),
    'corner_pool.CornerPool': lambda: run_on_maps(ops.CornerPool('top')),
    'cc_attention.CrissCrossAttention': lambda: run_on_maps(ops.CrissCrossAttention(8), 8),
    'psa_mask.PSAMask': lambda: run_on_maps(ops.PSAMask('collect', (3, 3)), 9),
    'point_sample.point_sample': lambda: run(ops.point_sample, maps(2, 4, 6, 7), maps(2, 5, 2)),
    'point_sample.SimpleRoIAlign': lambda: run_on_maps(
        lambda x: ops.SimpleRoIAlign((3, 3), 0.5)(x, ROIS)
    ),
    # mmcv gives it no gradient.
    'point_sample.rel_roi_point_to_rel_img_point': lambda: [
        ops.rel_roi_point_to_rel_img_point(ROIS, torch.rand(2, 5, 2), (6, 7))
    ],
    'merge_cells.BaseMergeCell': lambda: run_on_maps(
        lambda x: merge_cells.BaseMergeCell(4, 4)._resize(x, (3, 4))
    ),
    'merge_cells.ConcatCell': lambda: run_on_maps(
        lambda x: merge_cells.ConcatCell(4, 4)(x, x[:, :, ::2, ::2])
    ),
    'merge_cells.SumCell': lambda: run_on_maps(
        lambda x: merge_cells.SumCell(4, 4)(x, x[:, :, ::2, ::2])
    ),
    'merge_cells.GlobalPoolingCell': lambda: run_on_maps(
        lambda x: merge_cells.GlobalPoolingCell(4, 4)(x, x)
    ),
}


def test_every_operator_of_the_model_zoo_is_run():
    assert recorded() == FAMILIES.keys()


@each('family', FAMILIES)
def test_an_operator_runs_forwards_and_backwards(family):
    if selected_operators() == 'compiled':
        pytest.skip('the compiled mmcv takes precedence over ours')
    output, *inputs = FAMILIES[family]()
    assert output.isfinite().all()
    for grad in torch.autograd.grad(output.square().sum(), inputs) if inputs else ():
        assert grad.isfinite().all() and grad.any()
