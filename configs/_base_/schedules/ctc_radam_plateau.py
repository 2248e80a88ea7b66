# arXiv 2006.16236, §4.3: RAdam at 1e-4, halved when the validation error stops falling. Our
# choices: patience 3, 100 epochs, gradient clipping.
optim_wrapper = dict(optimizer=dict(type='RAdam', lr=1e-4), clip_grad=dict(max_norm=5.0))
param_scheduler = [
    dict(
        type='ReduceOnPlateauLR',
        monitor='phoneme_error_rate',
        rule='less',
        factor=0.5,
        patience=3,
        min_value=1e-6,
    )
]

train_cfg = dict(by_epoch=True, max_epochs=100, val_interval=1)
val_cfg = dict()
test_cfg = dict()

# For `--auto-scale-lr`.
auto_scale_lr = dict(base_batch_size=16)
