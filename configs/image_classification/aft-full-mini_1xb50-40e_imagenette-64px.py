# AFT-full on 900 images of Imagenette at 64 px: 50.3 % top-1.
# 5 to 7 minutes on one CPU thread.
#     aft_mm train aft-full-mini_1xb50-40e_imagenette-64px
# The number is of a run with --cfg-options model.backbone.token_mixer.init_std=0.01.
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
        token_mixer=dict(type='aft_mm.AFTFull', rank=32),
        position_embedding=True,
    )
)

train_dataloader = dict(batch_size=50)
train_cfg = dict(max_epochs=40)
