# DeiT III for ViT-S (arXiv 2204.07118): LAMB, binary cross entropy, 3-Augment, 800 epochs at batch
# 2048, without LayerScale.
_base_ = 'aft-conv-small-h384-k11_8xb128-300e_in1k.py'

model = dict(
    backbone=dict(drop_path_rate=0.05),
    # mmpretrain sums over the 1000 classes.
    head=dict(
        loss=dict(_delete_=True, type='CrossEntropyLoss', use_sigmoid=True, loss_weight=1e-3)
    ),
)

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomResizedCrop', scale=224, backend='pillow', interpolation='bicubic'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    # 3-Augment: one of the three, always.
    dict(
        type='RandomChoice',
        transforms=[
            [dict(type='RandomGrayscale', prob=1.0, keep_channels=True)],
            [dict(type='Solarize', thr=128, prob=1.0)],
            [dict(type='GaussianBlur', magnitude_range=(0.1, 2.0), magnitude_std='inf', prob=1.0)],
        ],
    ),
    dict(type='ColorJitter', brightness=0.3, contrast=0.3, saturation=0.3),
    dict(type='PackInputs'),
]
train_dataloader = dict(batch_size=256, dataset=dict(pipeline=train_pipeline))

# LAMB clips gradients at a norm of 1 itself.
optim_wrapper = dict(optimizer=dict(_delete_=True, type='Lamb', lr=4e-3, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6 / 4e-3, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, begin=5),
]
train_cfg = dict(max_epochs=800)
auto_scale_lr = dict(base_batch_size=2048)
