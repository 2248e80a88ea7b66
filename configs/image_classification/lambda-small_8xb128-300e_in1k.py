_base_ = [
    '../_base_/models/lambda.py',
    '../_base_/datasets/imagenet_deit_224.py',
    '../_base_/schedules/deit_300e.py',
    '../_base_/default_runtime.py',
]

model = dict(backbone=dict(arch='small', token_mixer=dict(num_heads=6)), head=dict(in_channels=384))

train_dataloader = dict(batch_size=128)
