_base_ = './aft-simple-l24-d256_8xb16-200e_shapenet-all.py'

train_dataloader = dict(dataset=dict(classes=('airplane',)))
val_dataloader = dict(dataset=dict(classes=('airplane',)))
test_dataloader = dict(dataset=dict(classes=('airplane',)))

# Ours: an epoch of one class is much shorter than one of all.
train_cfg = dict(max_epochs=1000, val_interval=50)
default_hooks = dict(checkpoint=dict(interval=50))
custom_hooks = [dict(type='aft_mm.PointCloudHook', num_bits=8, up='y', interval=50)]
