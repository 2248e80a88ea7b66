# The copy task in arXiv 2006.16236, §4.1.1: RAdam at 1e-3, from update 3,000 on at 1e-4. 10,000
# updates are our choice.
optim_wrapper = dict(optimizer=dict(type='RAdam', lr=1e-3))
param_scheduler = [dict(type='MultiStepLR', milestones=[3000], gamma=0.1, by_epoch=False)]

train_cfg = dict(by_epoch=True, max_epochs=10, val_interval=1)
val_cfg = dict()
test_cfg = dict()

# For `--auto-scale-lr`.
auto_scale_lr = dict(base_batch_size=64)
