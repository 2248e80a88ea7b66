# CIFAR-10 in arXiv 2006.16236, §4.2: RAdam at a constant 1e-4 for seven days of one GPU, at batch
# 4, or 1 for softmax attention. The paper names no weight decay.
_base_ = [
    '../models/ar_logistic.py',
    '../datasets/cifar10_ar.py',
    '../ar_runtime.py',
]

# The paper names no augmentation, so there is none.
train_dataloader = dict(batch_size=4, dataset=dict(pipeline={{_base_.test_pipeline}}))
default_hooks = dict(
    checkpoint=dict(by_epoch=False, interval=2000),
    time_budget=dict(type='aft_mm.TimeBudgetHook', days=7),
)
optim_wrapper = dict(optimizer=dict(type='RAdam', lr=1e-4))
param_scheduler = [dict(type='ConstantLR', factor=1.0)]

# More epochs than fit into the time, each followed by an evaluation on the test set.
train_cfg = dict(by_epoch=True, max_epochs=10000, val_interval=1)
val_cfg = dict()
test_cfg = dict()

# For `--auto-scale-lr`.
auto_scale_lr = dict(base_batch_size=4)
