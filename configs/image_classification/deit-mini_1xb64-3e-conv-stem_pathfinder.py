_base_ = [
    '../_base_/models/aft_vit_conv_stem.py',
    '../_base_/datasets/pathfinder.py',
    '../_base_/schedules/one_cycle.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        arch=dict(embed_dims=64),
        in_channels=1,
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
        init_cfg=dict(std=0.125),  # 1 / sqrt(64)
    ),
    head=dict(num_classes=2, in_channels=64, loss=dict(_delete_=True, type='CrossEntropyLoss')),
)

train_dataloader = dict(batch_size=64)
# 500 updates per epoch.
optim_wrapper = dict(optimizer=dict(lr=5e-4, betas=(0.9, 0.98)), clip_grad=dict(max_norm=1.0))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=150),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-3, by_epoch=False, begin=150, end=1500),
]
train_cfg = dict(max_epochs=3)
