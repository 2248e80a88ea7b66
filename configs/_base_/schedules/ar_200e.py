# Images in arXiv 2105.14103, §5.1: AdamW at 3e-3, weight decay 0.1 on the weights of linear layers,
# 200 epochs at batch 128. The ICLR submission says Adam, with which decay would collapse the
# weights (configs/image_ar/README.md).
optim_wrapper = dict(
    optimizer=dict(type='AdamW', lr=3e-3, weight_decay=0.1),
    # Decay would pull W = exp(w) towards 1.
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

# 3e-3 after 4,000 iterations, then 3e-3 * sqrt(4000 / t): our reading of arXiv 1706.03762.
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=4000, by_epoch=False),
    dict(type='aft_mm.InverseSqrtLR', begin=4000, by_epoch=False),
]

train_cfg = dict(by_epoch=True, max_epochs=200, val_interval=10)
val_cfg = dict()
test_cfg = dict()

# For `--auto-scale-lr`.
auto_scale_lr = dict(base_batch_size=128)
