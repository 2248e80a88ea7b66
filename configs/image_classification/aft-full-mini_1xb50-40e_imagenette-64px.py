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
