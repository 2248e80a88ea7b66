_base_ = [
    '../_base_/models/deit.py',
    '../_base_/datasets/imagenet_deit_224.py',
    '../_base_/schedules/deit_300e.py',
    '../_base_/default_runtime.py',
]

train_dataloader = dict(batch_size=128)
