# DeiT (arXiv 2012.12877, table 9): 300 epochs of AdamW at batch 1024, 5 of them warming up, no
# gradient clipping.
optim_wrapper = dict(
    optimizer=dict(
        type='AdamW', lr=5e-4 * 1024 / 512, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05
    ),
    # DeiT decays no vectors, class token or position embedding. Decay of the position bias would
    # pull W = exp(w) towards 1.
    paramwise_cfg=dict(
        norm_decay_mult=0.0,
        bias_decay_mult=0.0,
        flat_decay_mult=0.0,
        custom_keys={
            'cls_token': dict(decay_mult=0.0),
            'pos_embed': dict(decay_mult=0.0),
            'pos_bias': dict(decay_mult=0.0),
        },
    ),
)

# Warm-up by iterations, then down to 1e-5 by epochs.
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', eta_min=1e-5, begin=5),
]

train_cfg = dict(by_epoch=True, max_epochs=300, val_interval=1)
val_cfg = dict()
test_cfg = dict()

# DeiT keeps an average of the weights (decay 0.99996) but reports the weights themselves.
custom_hooks = [
    dict(
        type='EMAHook',
        momentum=4e-5,
        evaluate_on_ema=False,
        evaluate_on_origin=True,
        priority='ABOVE_NORMAL',
    )
]

# For `--auto-scale-lr`: lr = 5e-4 * batch / 512.
auto_scale_lr = dict(base_batch_size=1024)
