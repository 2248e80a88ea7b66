# MNIST in arXiv 2006.16236, §4.2: RAdam at a constant 1e-4, 250 epochs at batch 10. The paper names
# no weight decay.
_base_ = [
    '../models/ar_logistic.py',
    '../datasets/mnist_ar.py',
    '../ar_runtime.py',
]

train_dataloader = dict(batch_size=10)
optim_wrapper = dict(optimizer=dict(type='RAdam', lr=1e-4))
param_scheduler = [dict(type='ConstantLR', factor=1.0)]

train_cfg = dict(by_epoch=True, max_epochs=250, val_interval=10)
val_cfg = dict()
test_cfg = dict()

# For `--auto-scale-lr`.
auto_scale_lr = dict(base_batch_size=10)
