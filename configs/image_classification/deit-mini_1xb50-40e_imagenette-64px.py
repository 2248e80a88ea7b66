# Softmax attention on 900 images of Imagenette at 64 px: 45.1 % top-1, the mean of three seeds.
# 5 to 7 minutes on one CPU thread.
#     aft_mm train deit-mini_1xb50-40e_imagenette-64px
_base_ = [
    '../_base_/models/aft_vit_mini.py',
    '../_base_/datasets/imagenette.py',
    '../_base_/schedules/mini.py',
    '../_base_/default_runtime.py',
]

model = dict(
    backbone=dict(
        img_size=64,
        patch_size=8,
        token_mixer=dict(type='aft_mm.SoftmaxAttention', num_heads=4),
        position_embedding=True,
    )
)

train_dataloader = dict(batch_size=50)
train_cfg = dict(max_epochs=40)
