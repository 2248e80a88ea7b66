# AFT-full on 6,000 images of CIFAR-10: 47.6 % top-1.
# 5 to 7 minutes on one CPU thread.
#     aft_mm train aft-full-mini_1xb100-8e_cifar10
# The number is of a run with --cfg-options model.backbone.token_mixer.init_std=0.01.
_base_ = [
    '../_base_/models/aft_vit_mini.py',
    '../_base_/datasets/cifar10.py',
    '../_base_/schedules/mini.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        img_size=32,
        patch_size=4,
        token_mixer=dict(type='aft_mm.AFTFull', rank=32),
        position_embedding=True,
    )
)

train_dataloader = dict(batch_size=100)
train_cfg = dict(max_epochs=8)
