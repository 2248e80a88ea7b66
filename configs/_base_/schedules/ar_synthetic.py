# 1,000 updates of 64 sequences with a warm-up and a cosine to 1 % of the rate.
optim_wrapper = dict(
    optimizer=dict(type='Adam', lr=3e-3),
    clip_grad=dict(max_norm=1.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, begin=0, end=100, by_epoch=False),
    dict(type='CosineAnnealingLR', eta_min_ratio=0.01, begin=100, end=1000, by_epoch=False),
]

train_cfg = dict(by_epoch=True, max_epochs=1, val_interval=1)
val_cfg = dict()
test_cfg = dict()

# For `--auto-scale-lr`.
auto_scale_lr = dict(base_batch_size=64)
