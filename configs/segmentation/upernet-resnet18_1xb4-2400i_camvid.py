# ResNet-18 from random weights, to compare AFT-conv with.
_base_ = [
    '../_base_/models/upernet_aft_conv_mini.py',
    '../_base_/datasets/camvid.py',
    '../_base_/schedules/seg_mini_2400i.py',
    '../_base_/seg_runtime.py',
]

model = dict(
    data_preprocessor=dict(
        _delete_=True,
        type='SegDataPreProcessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=11,
        size=(256, 256),
    ),
    backbone=dict(
        _delete_=True,
        type='ResNetV1c',
        depth=18,
        norm_cfg=dict(type='BN', requires_grad=True),
    ),
    neck=None,
    decode_head=dict(
        in_channels=[64, 128, 256, 512],
        loss_decode=[
            dict(type='CrossEntropyLoss', loss_weight=1.0),
            dict(type='LovaszLoss', reduction='none', loss_weight=1.0),
        ],
    ),
    auxiliary_head=dict(in_channels=512),
)

train_dataloader = dict(batch_size=4)
