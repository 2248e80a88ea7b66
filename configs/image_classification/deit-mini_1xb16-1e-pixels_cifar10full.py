_base_ = [
    '../_base_/models/aft_vit_conv_stem.py',
    '../_base_/datasets/cifar10.py',
    '../_base_/schedules/one_cycle.py',
    '../_base_/default_runtime.py',
]

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

# 40,000 images, batches 1 to 4, for training, and 5,000 of batch 5 for testing.
data_root = '{{$AFT_MM_DATA:data}}/cifar10_full'
train_dataloader = dict(batch_size=16, dataset=dict(data_root=data_root, num_batches=4))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))

# An epoch of 2,500 updates.
optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=40),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-3, by_epoch=False, begin=40, end=2500),
]
train_cfg = dict(max_epochs=1)
