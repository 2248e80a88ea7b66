# AFT-conv on the 8 x 8 digits of scikit-learn: 1 to 2 minutes on one CPU thread, 98.1 % (seed 0).
#     make quickstart
_base_ = [
    '../_base_/datasets/digits.py',
    '../_base_/schedules/mini.py',
    '../_base_/default_runtime.py',
]

# 4 x 4 tokens of 2 x 2 pixels, and a bias for every offset.
model = dict(
    type='ImageClassifier',
    backbone=dict(
        type='aft_mm.AFTViT',
        arch=dict(embed_dims=64, num_layers=4, mlp_ratio=2),
        img_size=8,
        patch_size=2,
        in_channels=1,
        token_mixer=dict(type='aft_mm.AFTConv', num_heads=16, kernel_size=7),
        position_embedding=False,
        out_type='avg_featmap',
        # About 1 / sqrt(64); with 0.02 as for wide models, training takes twice as long.
        init_cfg=dict(type='TruncNormal', layer='Linear', std=0.1),
    ),
    head=dict(
        type='LinearClsHead',
        num_classes=10,
        in_channels=64,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
    ),
    train_cfg=dict(augments=dict(type='Mixup', alpha=0.2)),
)

train_dataloader = dict(batch_size=64)
optim_wrapper = dict(optimizer=dict(lr=3e-3))
train_cfg = dict(max_epochs=50)
# An epoch takes a second.
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=5))
