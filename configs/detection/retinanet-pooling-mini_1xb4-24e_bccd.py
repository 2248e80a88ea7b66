# Average pooling in the place of AFT-conv, as a control.
_base_ = [
    '../_base_/models/retinanet_aft_conv_mini.py',
    '../_base_/datasets/bccd.py',
    '../_base_/schedules/det_mini.py',
    '../_base_/det_runtime.py',
]

model = dict(
    backbone=dict(
        arch=dict(mlp_ratio=458 / 96),  # for equal parameters
        token_mixer=dict(_delete_=True, type='aft_mm.Pooling', kernel_size=7),
    ),
    bbox_head=dict(num_classes=3),
)

train_dataloader = dict(batch_size=4)
train_cfg = dict(max_epochs=24)
