# Softmax attention on 6,000 images of CIFAR-10: 43.7 % top-1.
# 5 to 7 minutes on one CPU thread.
#     aft_mm train deit-mini_1xb100-8e_cifar10
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
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
        position_embedding=True,
    )
)

train_dataloader = dict(batch_size=100)
train_cfg = dict(max_epochs=8)
