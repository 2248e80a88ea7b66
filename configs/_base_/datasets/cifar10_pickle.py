# CIFAR-10 in its python distribution, <data_root>/cifar-10-batches-py/: the whole set only, every
# file is held against its published MD5 before it is unpickled.
_base_ = './cifar10.py'

train_dataloader = dict(dataset=dict(type='CIFAR10', download=False))
val_dataloader = dict(dataset=dict(type='CIFAR10', download=False))
test_dataloader = val_dataloader
