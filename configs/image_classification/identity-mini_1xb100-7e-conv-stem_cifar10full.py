_base_ = [
    '../_base_/models/aft_vit_conv_stem.py',
    '../_base_/datasets/cifar10_full.py',
    '../_base_/schedules/one_cycle.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        arch=dict(mlp_ratio=251 / 96),  # for equal parameters
        token_mixer=dict(type='aft_mm.Identity'),
        position_embedding=False,
    )
)

train_dataloader = dict(batch_size=100)
train_cfg = dict(max_epochs=7)
