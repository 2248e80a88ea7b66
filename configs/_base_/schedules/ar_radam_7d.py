# CIFAR-10 in the linear-transformer paper (arXiv 2006.16236, §4.2): RAdam at 1e-4 for seven days of
# one GPU, at batch 4, or 1 for softmax attention. The configs set the end of the
# training; the rate is constant and there is no weight decay, since the paper names neither.
optim_wrapper = dict(optimizer=dict(type='RAdam', lr=1e-4))
param_scheduler = [dict(type='ConstantLR', factor=1.0)]

# More epochs than fit into the time. An epoch has 12,500 iterations, or 50,000 at batch 1, and ends with
# an evaluation on the test set. A killed run loses only the iterations since its last checkpoint.
train_cfg = dict(by_epoch=True, max_epochs=10000, val_interval=1)
val_cfg = dict()
test_cfg = dict()

# `--auto-scale-lr` scales the rate to the batch that is really used.
auto_scale_lr = dict(base_batch_size=4)
