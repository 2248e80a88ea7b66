# Small models on small data, on a CPU; the config sets the number of epochs.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={'pos_embed': dict(decay_mult=0.0), 'pos_bias': dict(decay_mult=0.0)},
    ),
)

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=3, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, begin=3, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, val_interval=5)
val_cfg = dict()
test_cfg = dict()
