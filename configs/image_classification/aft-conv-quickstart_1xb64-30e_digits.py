_base_ = [
    '../_base_/datasets/digits.py',
    '../_base_/schedules/mini.py',
    '../_base_/default_runtime.py'
]

# Every pixel is a token: 8 x 8 of them, and a kernel that reaches 3 pixels to each side.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='aft_mm.AFTViT',
        arch=dict(embed_dims=64, num_layers=4, mlp_ratio=2),
        img_size=8,
        patch_size=1,
        in_channels=1,
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=16, kernel_size=7),
        position_embedding=False,
        out_type='avg_featmap'),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='CrossEntropyLoss'),
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.02)))

train_dataloader = dict(batch_size=64)
train_cfg = dict(max_epochs=30)
default_hooks = dict(logger=dict(interval=20))
