_base_ = [
    '../_base_/models/upernet_aft_conv.py',
    '../_base_/datasets/ade20k.py',
    '../_base_/schedules/seg_160k.py',
    '../_base_/seg_runtime.py',
]

model = dict(
    backbone=dict(arch='small', token_mixer=dict(num_heads=384)),
    neck=dict(in_channels=[384, 384, 384, 384], out_channels=384),
    decode_head=dict(in_channels=[384, 384, 384, 384]),
    auxiliary_head=dict(in_channels=384),
)
