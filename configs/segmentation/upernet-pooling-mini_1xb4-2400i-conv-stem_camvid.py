# Average pooling in the place of AFT-conv, as a control.
_base_ = [
    '../_base_/models/upernet_aft_conv_mini.py',
    '../_base_/datasets/camvid.py',
    '../_base_/schedules/seg_mini_2400i.py',
    '../_base_/seg_runtime.py',
]

model = dict(
    backbone=dict(
        conv_stem=True,
        arch=dict(mlp_ratio=458 / 96),  # for equal parameters
        token_mixer=dict(_delete_=True, type='aft_mm.Pooling', kernel_size=7),
    ),
    decode_head=dict(
        loss_decode=[
            dict(type='CrossEntropyLoss', loss_weight=1.0),
            dict(type='LovaszLoss', reduction='none', loss_weight=1.0),
        ]
    ),
)

train_dataloader = dict(batch_size=4)
