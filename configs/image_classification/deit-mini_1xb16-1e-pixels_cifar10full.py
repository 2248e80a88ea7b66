_base_ = '../_base_/recipes/1xb100-7e-conv-stem_cifar10full.py'

# Each of the 32 x 32 pixels is a token.
model = dict(
    backbone=dict(
        arch=dict(embed_dims=64),
        patch_size=1,
        conv_stem=False,
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
        init_cfg=dict(std=0.125),  # 1 / sqrt(64)
    ),
    head=dict(in_channels=64),
)

# 2,500 updates.
train_dataloader = dict(batch_size=16)
optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=40),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-3, by_epoch=False, begin=40, end=2500),
]
train_cfg = dict(max_epochs=1)
