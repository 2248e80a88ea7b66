# DeiT (arXiv 2012.12877, table 9): 300 epochs of AdamW at batch 1024, 5 of them warming up.
# No gradient clipping, as in DeiT's own code (mmpretrain's configs clip at 5 and warm up for 20).
optim_wrapper = dict(
    optimizer=dict(
        type='AdamW', lr=5e-4 * 1024 / 512, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.05
    ),
    # DeiT decays no bias, norm or other vector, nor the class token and the position embedding.
    # What makes the position bias w is spared likewise: decay would pull W = exp(w) towards 1,
    # that is every AFT towards AFT-simple, and shrink the gains of AFT-conv, which start at 0.
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

# From a thousandth of the rate to the full rate step by step, then down to 1e-5 epoch by epoch.
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

# `--auto-scale-lr` scales the rate to the batch that is really used: lr = 5e-4 * batch / 512.
auto_scale_lr = dict(base_batch_size=1024)
