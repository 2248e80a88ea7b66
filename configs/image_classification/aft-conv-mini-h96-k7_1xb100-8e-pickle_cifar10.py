_base_ = './aft-conv-mini-h96-k7_1xb100-8e_cifar10.py'

# CIFAR-10 in its python distribution, <data_root>/cifar-10-batches-py/, whose MD5s are checked.
train_dataloader = dict(dataset=dict(type='CIFAR10', download=False))
val_dataloader = dict(dataset=dict(type='CIFAR10', download=False))
test_dataloader = dict(dataset=dict(type='CIFAR10', download=False))
