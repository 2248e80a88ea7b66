# seg_mini with 2,400 iterations.
_base_ = './seg_mini.py'

train_cfg = dict(type='IterBasedTrainLoop', max_iters=2400, val_interval=600)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, by_epoch=False, begin=0, end=50),
    dict(type='CosineAnnealingLR', eta_min=1e-5, by_epoch=False, begin=50, end=2400),
]
