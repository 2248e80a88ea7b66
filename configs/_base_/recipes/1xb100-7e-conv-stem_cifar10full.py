_base_ = [
    '../models/aft_vit_conv_stem.py',
    '../datasets/cifar10.py',
    '../schedules/one_cycle.py',
    '../default_runtime.py',
]

# 40,000 images, batches 1 to 4, for training, and 5,000 of batch 5 for testing.
data_root = '{{$AFT_MM_DATA:data}}/cifar10_full'
train_dataloader = dict(batch_size=100, dataset=dict(data_root=data_root, num_batches=4))
val_dataloader = dict(dataset=dict(data_root=data_root))
test_dataloader = dict(dataset=dict(data_root=data_root))
train_cfg = dict(max_epochs=7)
