# A one-cycle schedule for a training of minutes: a linear warm-up, then a cosine to zero.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=3e-3, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={'pos_embed': dict(decay_mult=0.0), 'pos_bias': dict(decay_mult=0.0)},
    ),
)

param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, begin=0, end=2, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min_ratio=1e-3, begin=2, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, val_interval=1)
val_cfg = dict()
test_cfg = dict()
