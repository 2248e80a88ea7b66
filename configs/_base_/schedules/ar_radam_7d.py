# CIFAR-10 in arXiv 2006.16236, §4.2: RAdam at a constant 1e-4 for seven days of one GPU, at batch
# 4, or 1 for softmax attention. The paper names no weight decay.
optim_wrapper = dict(optimizer=dict(type='RAdam', lr=1e-4))
param_scheduler = [dict(type='ConstantLR', factor=1.0)]

# More epochs than fit into the time, each followed by an evaluation on the test set.
train_cfg = dict(by_epoch=True, max_epochs=10000, val_interval=1)
val_cfg = dict()
test_cfg = dict()

# For `--auto-scale-lr`.
auto_scale_lr = dict(base_batch_size=4)
