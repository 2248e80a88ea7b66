# Small models on small data; the config sets the number of epochs.
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=3e-3, weight_decay=0.1),
    clip_grad=dict(max_norm=1.0),
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={
            'embedding': dict(decay_mult=0.0),
            # Pixels go through a linear layer; of the keys that match, the longest counts.
            'embedding.projection.weight': dict(decay_mult=1.0),
            'pos_bias': dict(decay_mult=0.0),
        },
    ),
)

param_scheduler = [
    dict(type='LinearLR', start_factor=1e-2, begin=0, end=100, by_epoch=False),
    dict(type='CosineAnnealingLR', eta_min=1e-4, begin=0, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, val_interval=1)
val_cfg = dict()
test_cfg = dict()
