_base_ = [
    '../_base_/models/upernet_aft_conv.py',
    '../_base_/datasets/camvid.py',
    '../_base_/schedules/seg_mini.py',
    '../_base_/seg_runtime.py',
]

norm_cfg = dict(type='BN', requires_grad=True)
model = dict(
    data_preprocessor=dict(preprocessor=dict(size=(256, 256), seg_pad_val=11)),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=96, num_layers=5),
        patch_size=8,
        token_mixer=dict(num_heads=96, kernel_size=7),
        out_indices=(1, 2, 3, 4),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.1),
    ),
    # The map has one place per 8 pixels: strides of 4 to 32.
    neck=dict(in_channels=[96, 96, 96, 96], out_channels=96, scales=[2, 1, 0.5, 0.25]),
    decode_head=dict(
        in_channels=[96, 96, 96, 96],
        channels=96,
        num_classes=11,
        ignore_index=11,
        norm_cfg=norm_cfg,
    ),
    auxiliary_head=dict(
        in_channels=96, channels=96, num_classes=11, ignore_index=11, norm_cfg=norm_cfg
    ),
)

train_dataloader = dict(batch_size=4)
train_cfg = dict(type='IterBasedTrainLoop', max_iters=1200, val_interval=300)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=50, end=1200),
]
