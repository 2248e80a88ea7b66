_base_ = [
    '../_base_/models/aft_conv.py',
    '../_base_/datasets/imagenet_deit_224.py',
    '../_base_/schedules/deit_300e.py',
    '../_base_/default_runtime.py',
]

model = dict(backbone=dict(token_mixer=dict(num_heads=32, kernel_size=11)))

train_dataloader = dict(batch_size=128)
