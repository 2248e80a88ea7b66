_base_ = [
    '../_base_/models/upernet_aft_conv_mini.py',
    '../_base_/datasets/camvid.py',
    '../_base_/schedules/seg_mini.py',
    '../_base_/seg_runtime.py',
]

train_dataloader = dict(batch_size=4)
train_cfg = dict(type='IterBasedTrainLoop', max_iters=1200, val_interval=300)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=50, end=1200),
]
