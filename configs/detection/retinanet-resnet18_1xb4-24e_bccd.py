# ResNet-18 with its feature pyramid from random weights, to compare AFT-conv with.
_base_ = [
    'mmdet::_base_/models/retinanet_r50_fpn.py',
    '../_base_/datasets/bccd.py',
    '../_base_/schedules/det_mini.py',
    '../_base_/det_runtime.py',
]

model = dict(
    backbone=dict(depth=18, frozen_stages=-1, norm_eval=False, init_cfg=None),
    neck=dict(in_channels=[64, 128, 256, 512], out_channels=96, num_outs=4),
    bbox_head=dict(
        num_classes=3,
        in_channels=96,
        feat_channels=96,
        stacked_convs=2,
        anchor_generator=dict(strides=[8, 16, 32, 64]),
    ),
)

train_dataloader = dict(batch_size=4)
train_cfg = dict(max_epochs=24)
