# CIFAR-10 in the linear-transformer paper (arXiv 2006.16236, §4.2): RAdam at 1e-4 for seven days of
# one GPU, at batch 4, or 1 for softmax attention. The leaves say when the days are over; the rate
# is constant and there is no weight decay, as the paper names neither a schedule nor a decay.
optim_wrapper = dict(optimizer=dict(type='RAdam', lr=1e-4))
param_scheduler = [dict(type='ConstantLR', factor=1.0)]

# More epochs than fit. One is long, 12,500 iterations, or 50,000 at batch 1: each ends with a look at
# the test set, and a killed run loses the iterations since its last checkpoint at most.
train_cfg = dict(by_epoch=True, max_epochs=10000, val_interval=1)
val_cfg = dict()
test_cfg = dict()

# `--auto-scale-lr` scales the rate to the batch that is really used.
auto_scale_lr = dict(base_batch_size=4)
