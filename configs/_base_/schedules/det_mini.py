# Small detectors on small data, on a CPU; the config sets the number of epochs.
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={'pos_bias': dict(decay_mult=0.0)},
    ),
    clip_grad=dict(max_norm=1.0),
)

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=1, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, begin=1, convert_to_iter_based=True),
]

train_cfg = dict(type='EpochBasedTrainLoop', val_interval=4)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
