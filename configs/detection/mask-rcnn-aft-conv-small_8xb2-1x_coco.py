_base_ = [
    '../_base_/models/mask_rcnn_aft_conv.py',
    '../_base_/datasets/coco_instance.py',
    '../_base_/schedules/det_1x.py',
    '../_base_/det_runtime.py',
]

model = dict(
    backbone=dict(arch='small', token_mixer=dict(num_heads=384)), neck=dict(in_channels=384)
)
