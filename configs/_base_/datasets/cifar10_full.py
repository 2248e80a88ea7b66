_base_ = './cifar10.py'

# 40,000 images, batches 1 to 4, for training, and 5,000 of batch 5 for testing.
data_root = '{{$AFT_MM_DATA:data}}/cifar10_full'
train_dataloader = dict(dataset=dict(data_root=data_root, num_batches=4))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
